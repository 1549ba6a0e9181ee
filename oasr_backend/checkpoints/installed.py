"""Readers from outside the package: what one of them does wrong is told with its name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from oasr_backend.checkpoints.base import Checkpoint, CheckpointInfo, OpenCheckpoint, Reader
from oasr_backend.errors import CheckpointError

ENTRY_POINTS = "oasr_backend.readers"


class InstalledReader:
    """Another reader, whose own CheckpointErrors pass; every other fault of it becomes one."""

    def __init__(self, point: EntryPoint) -> None:
        """Raises CheckpointError for a reader that cannot be made."""
        try:
            self._reader: Reader = point.load()()
            self.name = str(self._reader.name)
            self.file_names = tuple(self._reader.file_names)
        except Exception as error:
            raise CheckpointError(
                f"the reader {point.name!r} ({point.value}) is installed but cannot be used "
                f"({type(error).__name__}: {error}); mend or uninstall its package"
            ) from error

    def recognises(self, path: Path) -> bool:
        try:
            return bool(self._reader.recognises(path))
        except Exception as error:
            raise self._fault(f"cannot tell whether it knows {path}", error) from error

    def open(self, path: Path) -> OpenCheckpoint:
        doing = f"cannot open {path}"
        try:
            opened = self._reader.open(path)
            if opened is None:
                raise TypeError("open() gave None, no OpenCheckpoint")
            return InstalledCheckpoint(self, path, opened, opened.info)
        except CheckpointError:
            raise
        except Exception as error:
            raise self._fault(doing, error) from error

    def load(self, path: Path, opened: OpenCheckpoint) -> Checkpoint:
        """What `opened`, which this reader gave for the path, loads."""
        doing = f"cannot load {path}"
        try:
            checkpoint = opened.load()
        except CheckpointError:
            raise
        except Exception as error:
            raise self._fault(doing, error) from error
        if not isinstance(checkpoint, Checkpoint):
            raise self._told(doing, f"load() gave {checkpoint!r}, no Checkpoint")
        return checkpoint

    def _fault(self, doing: str, error: Exception) -> CheckpointError:
        return self._told(doing, f"{type(error).__name__}: {error}")

    def _told(self, doing: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"the installed reader {self.name!r} {doing} ({what}); mend or uninstall its package"
        )


class InstalledCheckpoint:
    """What an installed reader has opened. Its `info` is read once, so that no fault comes late."""

    def __init__(
        self, reader: InstalledReader, path: Path, opened: OpenCheckpoint, info: CheckpointInfo
    ) -> None:
        """Raises TypeError for an `info` of another type."""
        if not isinstance(info, CheckpointInfo):
            raise TypeError(f"its info is {info!r}, no CheckpointInfo")
        self.path, self.info = path, info
        self._reader, self._opened = reader, opened

    def load(self) -> Checkpoint:
        return self._reader.load(self.path, self._opened)


def installed_readers() -> list[InstalledReader]:
    """In the order of their entry points' names. Raises CheckpointError naming an unusable one."""
    points = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    return [InstalledReader(point) for point in points]
