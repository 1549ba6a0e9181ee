"""The files of an icefall checkpoint: which of them hold the weights, the tokens, the settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from oasr_backend.checkpoints.files import existing
from oasr_backend.errors import CheckpointError

logger = logging.getLogger(__name__)

WEIGHTS, TOKENS, PIECES = "pretrained.pt", "tokens.txt", "bpe.model"
#: How training names its files, by epoch or by batch.
OF_TRAINING = ("epoch-*.pt", "checkpoint-*.pt")
ARGUMENTS = ("train_args.json", "train_args.yaml", "train_args.yml")
#: A WeNet folder may hold files of the same names.
_OF_WENET = "train.yaml"
_LAYOUT = (
    f"an icefall checkpoint directory holds {WEIGHTS}, or one file of training such as "
    f"epoch-30.pt, {TOKENS}, and where they are known the arguments of training in {ARGUMENTS[0]}"
)


@dataclass(frozen=True)
class IcefallFiles:
    """`arguments` and `pieces` are None where there are none."""

    weights: Path
    tokens: Path
    arguments: Path | None
    pieces: Path | None


def is_icefall(path: Path) -> bool:
    """Whether it is a weights file beside tokens, or a folder of both, by names alone."""
    folder = path if path.is_dir() else path.parent
    if not (folder / TOKENS).is_file() or (folder / _OF_WENET).exists():
        return False
    if path.is_dir():
        return (folder / WEIGHTS).is_file() or bool(_of_training(folder))
    return path.is_file() and path.suffix == ".pt"


def find_files(path: Path) -> IcefallFiles:
    """`path` is the folder, or the weights file in it.

    Logs which weights are read and which are not. Raises CheckpointError for a file that is
    missing or stands for another, and for a folder that leaves open which weights are meant.
    """
    folder = path if path.is_dir() else path.parent
    given = [folder / name for name in ARGUMENTS if (folder / name).exists()]
    if len(given) > 1:
        raise CheckpointError(
            f"{folder} holds {' and '.join(file.name for file in given)}; leave one of them"
        )
    pieces = folder / PIECES
    return IcefallFiles(
        weights=existing(_weights(path), layout=_LAYOUT),
        tokens=existing(folder / TOKENS, layout=_LAYOUT),
        arguments=existing(given[0], layout=_LAYOUT) if given else None,
        pieces=existing(pieces, layout=_LAYOUT) if pieces.exists() else None,
    )


def _weights(path: Path) -> Path:
    if not path.is_dir():
        return path
    exported, training = path / WEIGHTS, _of_training(path)
    if exported.is_file():
        chosen = exported
    elif len(training) == 1:
        chosen = training[0]
    else:
        raise CheckpointError(
            f"{path} holds {', '.join(file.name for file in training)} and no {WEIGHTS}; point "
            f"checkpoint_dir at the file to serve, such as {training[-1]}, or export one as "
            f"{WEIGHTS}"
        )
    rest = [file.name for file in training if file != chosen]
    logger.info("event=icefall_weights file=%s not_served=%s", chosen, ",".join(rest) or "-")
    return chosen


def _of_training(folder: Path) -> list[Path]:
    """Files of training, those with longer numbers behind, so that the last one is the latest."""
    found = [file for pattern in OF_TRAINING for file in folder.glob(pattern)]
    return sorted(found, key=lambda file: (len(file.name), file.name))
