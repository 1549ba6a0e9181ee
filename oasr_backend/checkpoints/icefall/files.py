"""The files of an icefall checkpoint: which of them hold the weights, the tokens, the settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from oasr_backend.checkpoints.files import existing, export_in, is_named
from oasr_backend.errors import CheckpointError

logger = logging.getLogger(__name__)

WEIGHTS, TOKENS, PIECES = "pretrained.pt", "tokens.txt", "bpe.model"
#: How training names its files, by epoch or by batch.
OF_TRAINING = ("epoch-*.pt", "checkpoint-*.pt")
#: Copies that training makes of the files that did best.
_BEST = ("best-valid-loss.pt", "best-train-loss.pt")
_MOST_LISTED = 4
ARGUMENTS = ("train_args.json", "train_args.yaml", "train_args.yml")
#: A WeNet folder may hold files of the same names, beside its settings and one of these.
_CONFIG_OF_WENET, _OF_WENET = "train.yaml", ("final.pt", "units.txt")
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
    if not is_named(folder / TOKENS) or _is_of_wenet(folder):
        return False
    return bool(_with_known_names(folder)) if path.is_dir() else _is_weights(path)


def what_lacks(path: Path) -> str:
    """Why a path with files of icefall's is no checkpoint, with the remedy, in a clause.

    Empty for what is not icefall's at all, by names alone.
    """
    if path.is_dir():
        return _what_folder_lacks(path)
    if path.is_file() and path.name in (TOKENS, PIECES, *ARGUMENTS):
        return (
            f"{path.name} is no file of weights; give the checkpoint's folder, or its file of "
            "weights"
        )
    is_of_wenet = _is_of_wenet(path.parent) or path.name in _OF_WENET
    if not _is_weights(path) or is_of_wenet or export_in(path):
        return ""
    return "" if is_named(path.parent / TOKENS) else _lacks_tokens(path)


def _what_folder_lacks(folder: Path) -> str:
    if _is_of_wenet(folder):
        return ""
    if not is_named(folder / TOKENS):
        known = _with_known_names(folder)
        known += [folder / name for name in _BEST if is_named(folder / name)]
        return _lacks_tokens(known[0]) if known else ""
    others = sorted(
        file for file in folder.glob("*.pt") if _is_weights(file) and not export_in(file)
    )
    if not others:
        return ""
    names = ", ".join(file.name for file in others[:_MOST_LISTED])
    more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
    return (
        f"it has neither {WEIGHTS} nor one {' or '.join(OF_TRAINING)}, and other weights are not "
        f"served unasked: {names}{more}; pick one by `--checkpoint {others[0]}`"
    )


def _lacks_tokens(weights: Path) -> str:
    return (
        f"{TOKENS} is missing beside {weights.name}; copy it there from the training's lang folder"
    )


def _is_weights(path: Path) -> bool:
    return path.suffix == ".pt" and is_named(path) and not path.is_dir()


def _is_of_wenet(folder: Path) -> bool:
    return is_named(folder / _CONFIG_OF_WENET) and any(
        is_named(folder / name) for name in _OF_WENET
    )


def _with_known_names(folder: Path) -> list[Path]:
    """What may be meant as the weights, by its name."""
    exported = folder / WEIGHTS
    return [exported] * is_named(exported) + _of_training(folder)


def find_files(path: Path) -> IcefallFiles:
    """`path` is the folder, or the weights file in it.

    Logs which weights are read and which are not. Raises CheckpointError for a file that is
    missing or stands for another, and for a folder that leaves open which weights are meant.
    """
    folder = path if path.is_dir() else path.parent
    given = [folder / name for name in ARGUMENTS if is_named(folder / name)]
    if len(given) > 1:
        raise CheckpointError(
            f"{folder} holds {' and '.join(file.name for file in given)}; leave one of them"
        )
    pieces = folder / PIECES
    return IcefallFiles(
        weights=existing(_weights(path), layout=_LAYOUT),
        tokens=existing(folder / TOKENS, layout=_LAYOUT),
        arguments=existing(given[0], layout=_LAYOUT) if given else None,
        pieces=existing(pieces, layout=_LAYOUT) if is_named(pieces) else None,
    )


def _weights(path: Path) -> Path:
    if not path.is_dir():
        return path
    exported, training = path / WEIGHTS, _of_training(path)
    if is_named(exported):
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
