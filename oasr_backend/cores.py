"""How many processor cores this process may keep busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cores(cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Cores of the affinity mask, or as many as a container's CPU quota pays for; at least 1."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(round(quota) for quota in _quotas(cgroup_root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores by the quota of the process's own control group, version 2 or 1, if there is one."""
    v2 = _words(root / "cpu.max")
    v1 = _words(root / "cpu" / "cpu.cfs_quota_us") + _words(root / "cpu" / "cpu.cfs_period_us")
    for words in (v2, v1):
        # "max" and -1 stand for no quota.
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
