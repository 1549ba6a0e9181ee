"""Shared-memory regions of a server: names that cannot clash, and what a killed server leaves.

Triton's Python backend names a region `<prefix><uuid>` in /dev/shm and removes it at a clean exit
only. The prefix made here holds the process that owns it, so regions without a living owner can
be told apart and removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)

SHM_DIRECTORY = Path("/dev/shm")
_OWNED_REGION = re.compile(r"oasr_(?P<namespace>\d+)_(?P<pid>\d+)_")


def new_region_prefix() -> str:
    """A prefix owned by this process. It survives an exec, which keeps the process id."""
    return f"oasr_{_pid_namespace()}_{os.getpid()}_{secrets.token_hex(4)}_"


def unowned_region_prefix() -> str:
    """A prefix for a server that another process starts; this module never removes its regions."""
    return f"oasr_unowned_{secrets.token_hex(4)}_"


def leftover_regions(prefix: str, directory: Path = SHM_DIRECTORY) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.name.startswith(prefix))


def remove_regions(prefix: str, directory: Path = SHM_DIRECTORY) -> list[Path]:
    """Remove the regions of a server that has ended; returns those that were there."""
    regions = leftover_regions(prefix, directory)
    for region in regions:
        _remove(region)
    return regions


def remove_orphaned_regions(directory: Path = SHM_DIRECTORY) -> list[Path]:
    """Remove regions whose owner is gone: servers that ended by SIGKILL or lost power."""
    orphans = [path for path in leftover_regions("oasr_", directory) if _is_orphan(path.name)]
    for region in orphans:
        _remove(region)
    return orphans


def _remove(region: Path) -> None:
    # Another server may sweep at the same moment; a region of another user stays.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        region.unlink()
        logger.info("removed the leftover shared-memory region %s", region)


def _is_orphan(name: str) -> bool:
    match = _OWNED_REGION.match(name)
    # Containers may share /dev/shm; a process id means something in its own namespace only.
    if match is None or int(match["namespace"]) != _pid_namespace():
        return False
    return not Path("/proc", match["pid"]).exists()


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
