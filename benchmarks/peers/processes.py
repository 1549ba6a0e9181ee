"""What a server's processes use, read from /proc: processor time and memory of a whole tree."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KIB_PER_MIB = 1024


@dataclass(frozen=True)
class Memory:
    """In MiB. A page that n processes share counts in `pss` once in all, in `rss` n times."""

    pss_mib: float
    rss_mib: float


def tree(root: int) -> list[int]:
    """The process and all its descendants that live."""
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_s(root: int) -> float:
    """User and system time of the tree so far, without processes that have ended."""
    return sum(_ticks(pid) for pid in tree(root)) / _TICKS_PER_S


def memory(root: int) -> Memory:
    """Of the tree now."""
    pages = [_read(pid, "smaps_rollup") for pid in tree(root)]
    return Memory(_sum_mib(pages, "Pss"), _sum_mib(pages, "Rss"))


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields behind the name, which may itself hold spaces; none of an ended process."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _sum_mib(pages: list[str], field: str) -> float:
    found = [re.search(rf"^{field}:\s+(\d+) kB", page, re.MULTILINE) for page in pages]
    return sum(int(match[1]) for match in found if match) / _KIB_PER_MIB
