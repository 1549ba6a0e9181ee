"""What the start of a process takes: its time by stage, and memory that only the start needed."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

_STAT = Path("/proc/self/stat")
# Of the fields behind the program's name, which may itself hold spaces.
_START_FIELD = 19
_SMAPS = Path("/proc/self/smaps")
# A file's pages that may be run and not written, and how much of them is not the file's any more.
_CODE = re.compile(
    r"^(?P<first>[0-9a-f]+)-(?P<end>[0-9a-f]+) r-xp [0-9a-f]+ \S+ [1-9]\d* (?:.*\n)(?:[A-Z].*\n)*?"
    r"Anonymous: +(?P<changed_kib>\d+) kB$",
    re.MULTILINE,
)
_MADV_DONTNEED = 4


class LoadTimes:
    """Seconds of this process's life, by the stages that have ended.

    As text, with the sum of all: `import_s=1.52 read_s=0.31 total_s=1.83`.
    """

    def __init__(self) -> None:
        """The first stage began with the process."""
        self._stages_s: dict[str, float] = {}
        self._begin_s = _process_start_s()

    def end(self, stage: str) -> None:
        """All time since the end of the last stage was this one's."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._stages_s[stage] = self._stages_s.get(stage, 0.0) + now_s - self._begin_s
        self._begin_s = now_s

    def __str__(self) -> str:
        stages_s = {**self._stages_s, "total": sum(self._stages_s.values())}
        return " ".join(f"{stage}_s={seconds:.2f}" for stage, seconds in stages_s.items())


def settle_memory() -> None:
    """Collects what the start left over and gives it back to the kernel.

    What is left lives as long as the process, and the collector never looks at it again.
    """
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    # Only glibc has it; other allocators give memory back by themselves.
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    _unmap_code(libc)


def _unmap_code(libc: ctypes.CDLL) -> None:
    """Takes the pages of code off this process that it has run so far, most of them for imports.

    The kernel's file cache keeps them; one that is run again comes back within a microsecond.
    """
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, num_bytes in _code_regions(_SMAPS.read_text(errors="replace")):
        libc.madvise(first, num_bytes, _MADV_DONTNEED)


def _code_regions(smaps: str) -> Iterator[tuple[int, int]]:
    """First address and bytes of each mapping of code that is as it is in its file."""
    for match in _CODE.finditer(smaps):
        if match["changed_kib"] == "0":
            first = int(match["first"], 16)
            yield first, int(match["end"], 16) - first


def _process_start_s() -> float:
    """Seconds between the machine's start and this process's."""
    fields = _STAT.read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
