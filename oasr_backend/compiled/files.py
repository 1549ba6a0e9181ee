"""Where compiled encoders are kept between two starts."""

from __future__ import annotations

import contextlib
import hashlib
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
        """The file of that name, if it is as it was kept; it counts as used now.

        One that is not is removed, and the log says so.
        """
        path = self._folder / name
        if not path.is_file():
            return None
        if not _is_sound(path):
            logger.warning(
                "event=encoder_file_refused file=%s reason=%s",
                path,
                "it is not as it was kept, and is made anew",
            )
            self.forget(name)
            return None
        with contextlib.suppress(OSError):  # A folder that came with an image is read alone.
            os.utime(path)
        return path

    def forget(self, name: str) -> None:
        """Removes a graph with what lies beside it."""
        path = self._folder / name
        for part in (path, data_path(path), _sums_path(path)):
            with contextlib.suppress(OSError):
                part.unlink()

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
            _sums_path(path).write_text(_sums_of(path), encoding="ascii")
            # The graph last: where it is, the others are.
            for part in (data_path, _sums_path, Path):
                with contextlib.suppress(FileNotFoundError):
                    part(path).chmod(0o644)
                    os.replace(part(path), part(target))
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


def _sums_path(graph: Path) -> Path:
    """Where the checksums of a graph and of its large tensors lie."""
    return graph.with_name(f"{graph.name}.sums")


def _sums_of(graph: Path) -> str:
    return "".join(f"{_sum_of(path)}\n" for path in (graph, data_path(graph)))


def _sum_of(path: Path) -> str:
    """Hexadecimal; "-" for no file."""
    told = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                told.update(block)
    except OSError:
        return "-"
    return told.hexdigest()


def _is_sound(graph: Path) -> bool:
    """Whether a graph and its large tensors are those that were kept."""
    try:
        return _sums_path(graph).read_text(encoding="ascii") == _sums_of(graph)
    except (OSError, ValueError):
        return False
