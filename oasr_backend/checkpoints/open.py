"""The one door for checkpoints: the reader that recognises a path opens it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from oasr_backend.checkpoints.base import OpenCheckpoint, Reader
from oasr_backend.checkpoints.files import export_in, what_stands_at
from oasr_backend.checkpoints.icefall import IcefallReader
from oasr_backend.checkpoints.icefall.files import what_lacks as what_icefall_lacks
from oasr_backend.checkpoints.installed import InstalledReader, installed_readers
from oasr_backend.checkpoints.wenet import WenetReader
from oasr_backend.checkpoints.wenet.files import what_lacks as what_wenet_lacks
from oasr_backend.errors import CheckpointError

logger = logging.getLogger(__name__)

#: A folder of recordings that was given by mistake has thousands.
_MOST_LISTED = 12


def open_checkpoint(path: str | Path) -> OpenCheckpoint:
    """Opens a checkpoint by the reader that recognises it, built-in or installed.

    Of weights at most the shapes are read, and every other file is checked. Raises
    CheckpointError: for a path that no reader recognises, or more than one, with what it lacks, or
    what is there and what each reader looks for; and for whatever an installed reader raises, with
    the reader's name.
    """
    path = Path(path)
    readers: list[Reader] = [WenetReader(), IcefallReader(), *installed_readers()]
    faults: list[str] = []
    fitting = [reader for reader in readers if _recognises(reader, path, faults)]
    if len(fitting) == 1:
        return fitting[0].open(path)
    if fitting:
        names = " and ".join(reader.name for reader in fitting)
        raise CheckpointError(
            f"{path} is a checkpoint of {names} at once: {_found(path)}; leave the files of one"
        )
    told = _lacks(path, readers) or _unknown(path, readers)
    raise CheckpointError(f"{path} {told}" + "".join(f". And {fault}" for fault in faults))


def _lacks(path: Path, readers: Sequence[Reader]) -> str:
    """What keeps the path from being a checkpoint, where it has files of one."""
    if path.is_symlink() and not path.exists() and path.suffix != ".pt":
        return f"{what_stands_at(path)}; copy the checkpoint itself there"
    causes = [text for text in (what_wenet_lacks(path), what_icefall_lacks(path)) if text]
    others = [_layout(reader) for reader in readers if isinstance(reader, InstalledReader)]
    return f"is no whole checkpoint: {'. '.join([*causes, *others])}" if causes else ""


def _unknown(path: Path, readers: Sequence[Reader]) -> str:
    export = export_in(path)
    return (
        f"is no checkpoint that a reader knows: {_found(path)}. "
        f"{export and f'Of these, {export}. '}"
        f"{'. '.join(_layout(reader) for reader in readers)}. Copy the files there, point "
        "checkpoint_dir elsewhere, or install a reader for this kind"
    )


def _recognises(reader: Reader, path: Path, faults: list[str]) -> bool:
    """A reader that fails here must not keep the others from their checkpoints."""
    try:
        return reader.recognises(path)
    except CheckpointError as error:
        logger.warning("event=reader_failed reader=%r: %s", reader.name, error)
        faults.append(str(error))
        return False


def _layout(reader: Reader) -> str:
    article = "An" if reader.name[:1].lower() in "aeiou" else "A"
    return f"{article} {reader.name} checkpoint holds {', '.join(reader.file_names)}"


def _found(path: Path) -> str:
    if not path.exists():
        return "it does not exist"
    if not path.is_dir():
        return f"it is a file of {path.stat().st_size} bytes"
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"it holds {', '.join(names[:_MOST_LISTED])}{more}" if names else "it is an empty folder"
