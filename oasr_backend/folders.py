"""Where this package keeps what it can make again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """The per-user folder of caches; a temporary one if HOME is read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = Path(base) / "oasr_backend"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"oasr_backend-{os.getuid()}"
    if os.access(root, os.W_OK | os.X_OK):
        return root
    return Path(tempfile.gettempdir()) / f"oasr_backend-{os.getuid()}"
