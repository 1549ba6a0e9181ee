"""The files of a WeNet checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from oasr_backend.checkpoints.files import existing, is_named
from oasr_backend.checkpoints.icefall.files import is_icefall

CONFIG, WEIGHTS, UNITS = "train.yaml", "final.pt", "units.txt"
_LAYOUT = (
    f"a WeNet checkpoint directory holds {CONFIG}, {WEIGHTS}, {UNITS} and the CMVN file that "
    f"{CONFIG} names"
)


def is_wenet(path: Path) -> bool:
    """Whether it is a folder with WeNet's settings, not left over beside an icefall checkpoint.

    By names alone.
    """
    return is_named(path / CONFIG) and not is_icefall(path)


def what_lacks(path: Path) -> str:
    """Why a path with files of WeNet's is no checkpoint, with the remedy, in a clause.

    Empty for what is not WeNet's at all, by names alone.
    """
    if path.is_file() and path.name in (CONFIG, WEIGHTS, UNITS) and is_wenet(path.parent):
        return f"{path.name} is a file of a WeNet checkpoint; give its folder {path.parent}"
    if all(is_named(path / name) for name in (WEIGHTS, UNITS)) and not is_named(path / CONFIG):
        return f"{CONFIG} is missing beside {WEIGHTS}; copy it there from the training's folder"
    return ""


def needed(directory: Path, name: str) -> Path:
    """Raises CheckpointError for a file that is missing or stands for another."""
    return existing(directory / name, layout=_LAYOUT)
