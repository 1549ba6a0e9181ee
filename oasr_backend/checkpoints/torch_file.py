"""Reads files of `torch.save`, and says of others what they are.

Nothing that is pickled in a file ever runs: PyTorch's restricted reader refuses what is no data.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from oasr_backend.checkpoints.files import check_kind
from oasr_backend.checkpoints.pickled import imported_names
from oasr_backend.errors import CheckpointError

_ZIP_SIGN = b"PK\x03\x04"
#: A pickle of protocol 2 or later: how PyTorch began its files before 1.6.
_PICKLE_SIGN = b"\x80"
#: PyTorch's word for what a pickle wants to import.
_GLOBAL = re.compile(r"GLOBAL (\w+(?:\.\w+)+)")
#: Where that comes from which a pickled state dict of tensors imports.
_OF_STATE_DICTS = ("torch.", "collections.")
_BLOCK_BYTES = 1 << 20


def load_torch_file(path: Path, *, with_paths: bool = False, mapped: bool = False) -> Any:
    """What `torch.save` put into the file, on the CPU.

    `with_paths`: what was a path of Python's becomes text. `mapped`: tensors are read from the
    file when they are used, where it is an archive; it must stay as it is until then.

    Raises CheckpointError that says what the file is when it cannot be read, or holds what is no
    data.
    """
    check_kind(path)
    _check_archive(path)
    paths = _PATHS if with_paths else ()
    try:
        with _allowed(paths):
            return torch.load(
                path,
                map_location="cpu",
                weights_only=True,
                mmap=mapped and zipfile.is_zipfile(path),
            )
    except Exception as error:
        raise CheckpointError(_why_unreadable(path, error, paths)) from error


def _as_text(module: str, name: str) -> Callable[..., str]:
    """Stands for a class of paths while a file is read."""

    def text(*parts: str) -> str:
        return str(PurePosixPath(*parts))

    text.__module__, text.__name__, text.__qualname__ = module, name, name
    return text


#: Python 3.13 pickles them under a module of another name.
_PATHS = tuple(
    _as_text(module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
)


@contextlib.contextmanager
def _allowed(functions: Sequence[Callable[..., str]]) -> Iterator[None]:
    """PyTorch's reader may call these, and no more, beside what makes tensors."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(list(functions))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of `torch.save(model.state_dict(), path)`, by name, on the CPU.

    Raises CheckpointError for a file that cannot be read or holds anything else.
    """
    return tensors_by_name(load_torch_file(path), path, remedy=_save_again(path))


def tensors_by_name(state: Any, path: Path, *, key: str = "", remedy: str) -> dict[str, Tensor]:
    """What the file holds, at its top or under `key`, if that is tensors by name and nothing else.

    Raises CheckpointError, which ends in the remedy, for anything else.
    """
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        held = f"{kind} under {key!r}" if key else f"a {kind}"
        raise CheckpointError(f"{path} holds {held}, no tensors by name; {remedy}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            held = f"{kind} under {key!r}, {name!r}" if key else f"a {kind} under {name!r}"
            raise CheckpointError(
                f"{path} holds {held}, where a tensor by its name is meant; {remedy}"
            )
    return dict(state)


def _check_archive(path: Path) -> None:
    """Raises CheckpointError for an archive that is cut or holds a program beside its tensors."""
    with path.open("rb") as file:
        is_archive = file.read(len(_ZIP_SIGN)) == _ZIP_SIGN
    if not is_archive:
        return
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            damaged = _damaged_member(archive)
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated: the end of its archive is "
            "missing; copy it again"
        ) from error
    if any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError(
            f"{path} is a TorchScript archive, a program with its weights; give the state dict "
            "that it was exported from"
        )
    if damaged:
        raise CheckpointError(
            f"{path} is damaged: its member {damaged} differs from its checksum; copy it again"
        )


def _damaged_member(archive: zipfile.ZipFile) -> str | None:
    """The first member that is not what was written. A checksum of 0 says that none was made."""
    for member in archive.infolist():
        try:
            with archive.open(member) as content:
                while member.CRC and content.read(_BLOCK_BYTES):
                    pass
        except (EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return member.filename
    return None


def _why_unreadable(path: Path, error: Exception, allowed: Sequence[Callable[..., str]]) -> str:
    save_again = _save_again(path)
    found, names = _GLOBAL.search(str(error)), imported_names(path)
    known = {f"{function.__module__}.{function.__name__}" for function in allowed}
    foreign = [name for name in names if not name.startswith(_OF_STATE_DICTS) and name not in known]
    if found or foreign:
        return (
            f"{path} pickles {found[1] if found else foreign[0]}, which is no tensor and is not "
            f"run; {save_again}"
        )
    if names and "Unsupported operand" in str(error):
        return f"{path} is pickled in another way than torch.save does by default; {save_again}"
    size = path.stat().st_size
    with path.open("rb") as file:
        is_pickle = file.read(1) == _PICKLE_SIGN
    if is_pickle and isinstance(error, (EOFError, RuntimeError)):
        return f"{path} ({size} bytes) is truncated: its data end too early; copy it again"
    return (
        f"cannot read {path} ({size} bytes): it is damaged, incomplete or no "
        "PyTorch state dict; copy it again"
    )


def _save_again(path: Path) -> str:
    return (
        f"save the tensors alone where it was made: torch.save(model.state_dict(), {path.name!r})"
    )
