"""The one door for checkpoints: the reader that recognises a path opens it."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from oasr_backend.checkpoints.base import OpenCheckpoint, Reader
from oasr_backend.checkpoints.wenet import WenetReader
from oasr_backend.errors import CheckpointError

ENTRY_POINTS = "oasr_backend.readers"
#: A folder of recordings that was given by mistake has thousands.
_MOST_LISTED = 12


def open_checkpoint(path: str | Path) -> OpenCheckpoint:
    """Opens a checkpoint by the reader that recognises it, built-in or installed.

    No weights are read, and every other file is checked. Raises CheckpointError: for a path that
    no reader recognises, or more than one, with what is there and what each reader looks for.
    """
    path = Path(path)
    readers = _readers()
    fitting = [reader for reader in readers if reader.recognises(path)]
    if len(fitting) == 1:
        return fitting[0].open(path)
    if fitting:
        names = " and ".join(reader.name for reader in fitting)
        raise CheckpointError(
            f"{path} is a checkpoint of {names} at once: {_found(path)}; leave the files of one"
        )
    raise CheckpointError(
        f"{path} is no checkpoint that a reader knows: {_found(path)}. "
        f"{'; '.join(_layout(reader) for reader in readers)}. Copy the files there, point "
        "checkpoint_dir elsewhere, or install a reader for this kind"
    )


def _readers() -> list[Reader]:
    installed = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    return [WenetReader(), *map(_installed, installed)]


def _installed(point: EntryPoint) -> Reader:
    try:
        reader: Reader = point.load()()
    except Exception as error:
        raise CheckpointError(
            f"the reader {point.name!r} ({point.value}) is installed but cannot be used "
            f"({type(error).__name__}: {error}); mend or uninstall its package"
        ) from error
    return reader


def _layout(reader: Reader) -> str:
    return f"A {reader.name} checkpoint holds {', '.join(reader.file_names)}"


def _found(path: Path) -> str:
    if not path.exists():
        return "it does not exist"
    if not path.is_dir():
        return f"it is a file of {path.stat().st_size} bytes"
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"it holds {', '.join(names[:_MOST_LISTED])}{more}" if names else "it is an empty folder"
