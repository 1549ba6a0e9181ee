"""Where compiled encoders are kept between two starts."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oasr_backend.compiled.large_tensors import data_path
from oasr_backend.folders import cache_root

logger = logging.getLogger(__name__)

#: Of all files together; beyond it those go whose last use is the longest ago.
MOST_BYTES = 1 << 30
_STAGING = ".making-"
_LONGEST_MAKING_S = 3600


class GraphFiles:
    """A folder of graphs by name. Processes that write one at the same time keep the last."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_root() / "encoders"

    @property
    def is_writable(self) -> bool:
        """Whether a graph can be kept here."""
        return self._roomy() is not None

    def find(self, name: str) -> Path | None:
        """The file of that name, if there is one; it counts as used now."""
        path = self._folder / name
        if not path.is_file():
            return None
        with contextlib.suppress(OSError):  # A folder that came with an image is read alone.
            os.utime(path)
        return path

    def forget(self, name: str) -> None:
        """Removes a file that turned out to be of no use."""
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()
        with contextlib.suppress(OSError):
            data_path(self._folder / name).unlink()

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder for files that are not worth keeping yet; what is left there is removed."""
        with tempfile.TemporaryDirectory(prefix=_STAGING, dir=self._roomy()) as folder:
            yield Path(folder)

    def keep(self, path: Path) -> None:
        """Moves a finished graph here, under its own name, and lets the oldest go.

        Where the folder cannot be written to, the log says so.
        """
        try:
            target = self._folder / path.name
            with contextlib.suppress(FileNotFoundError):
                os.replace(data_path(path), data_path(target))
            os.replace(path, target)
            self._prune()
        except OSError as error:
            logger.warning(
                "event=encoder_not_kept folder=%s reason=%s: it is compiled again at each start; "
                "make the folder writable, or set XDG_CACHE_HOME to one that is",
                self._folder,
                error,
            )

    def _roomy(self) -> Path | None:
        """The folder itself, so that a rename within it is atomic; None: any temporary folder."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        return self._folder if os.access(self._folder, os.W_OK | os.X_OK) else None

    def _prune(self) -> None:
        """Lets go of what is too much, and of what a process left that was ended at its work."""
        used = sorted(self._folder.glob("*.onnx"), key=lambda path: -path.stat().st_mtime)
        total = 0
        for path in used:
            total += path.stat().st_size
            if data_path(path).exists():
                total += data_path(path).stat().st_size
            if total > MOST_BYTES and path != used[0]:
                self.forget(path.name)
        for folder in self._folder.glob(f"{_STAGING}*"):
            if folder.stat().st_mtime < time.time() - _LONGEST_MAKING_S:
                shutil.rmtree(folder, ignore_errors=True)
