"""The files of a WeNet checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from oasr_backend.checkpoints.files import existing

CONFIG, WEIGHTS, UNITS = "train.yaml", "final.pt", "units.txt"
_LAYOUT = (
    f"a WeNet checkpoint directory holds {CONFIG}, {WEIGHTS}, {UNITS} and the CMVN file that "
    f"{CONFIG} names"
)


def needed(directory: Path, name: str) -> Path:
    """Raises CheckpointError for a file that is missing or stands for another."""
    return existing(directory / name, layout=_LAYOUT)
