"""What the start of a process takes: its time by stage, and memory that only the start needed."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from pathlib import Path

_STAT = Path("/proc/self/stat")
# Of the fields behind the program's name, which may itself hold spaces.
_START_FIELD = 19


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


def _process_start_s() -> float:
    """Seconds between the machine's start and this process's."""
    fields = _STAT.read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
