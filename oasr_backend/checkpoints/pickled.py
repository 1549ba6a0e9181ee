"""What a pickle wants to import, read from its opcodes: nothing of it is run."""

from __future__ import annotations

import contextlib
import pickletools
import re
import zipfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

#: Far more than the names and shapes of a model's tensors take.
_MAX_BYTES = 1 << 24
_NAME = re.compile(r"[\w.]+")


def imported_names(path: Path) -> list[str]:
    """`module.name` of what the pickle in the file imports, as far as it can be read.

    `path` is a pickle, or an archive of `torch.save`.
    """
    names: list[str] = []
    # A damaged pickle ends before its last opcode.
    with contextlib.suppress(ValueError):
        names.extend(name for name in _imports(_pickle_in(path)) if _NAME.fullmatch(name))
    return names


def _pickle_in(path: Path) -> bytes:
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not names:
            return b""
        with archive.open(names[0]) as member:
            return member.read(_MAX_BYTES)


def _imports(content: bytes) -> Iterator[str]:
    memo: dict[object, object] = {}
    pushed: deque[object] = deque([None, None], maxlen=2)
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".", 1)
        elif opcode.name == "STACK_GLOBAL":
            yield f"{pushed[0]}.{pushed[1]}"
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
        elif opcode.name.endswith("PUT"):
            memo[argument] = pushed[-1]
        elif opcode.name.endswith("GET"):
            pushed.append(memo.get(argument))
        elif opcode.name != "FRAME":
            pushed.append(argument)
