"""Where this package keeps what it can make again."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path


def cache_root() -> Path:
    """The per-user folder of caches; a temporary one if HOME is read-only."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The standard has a relative one ignored.
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    root = Path(base) / "oasr_backend"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _temporary_root(tempfile.gettempdir())
    return root if os.access(root, os.W_OK | os.X_OK) else _temporary_root(tempfile.gettempdir())


@cache
def _temporary_root(parent: str) -> Path:
    """One for all processes of the user, unless somebody else could have put files there."""
    shared = Path(parent, f"oasr_backend-{os.getuid()}")
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="oasr_backend-", dir=parent))
    is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    if is_own and not shared.is_symlink():
        return shared
    return Path(tempfile.mkdtemp(prefix="oasr_backend-", dir=parent))
