"""Which model a benchmark runs: a checkpoint on disk, or random weights by family and size."""

from __future__ import annotations

import argparse
import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.random_wenet import WenetSize, write_random_wenet
from benchmarks.random_zipformer import HEADS, SIZES, write_random_zipformer

FAMILIES = ("wenet", "zipformer")
#: WeNet's common Conformer is the one size that figures are quoted for.
_WENET_SIZE = "medium"
#: Blank, the marks of a sentence and of what is unknown, and a unit that stands for text.
LEAST_VOCABULARY = 4


class Model(Protocol):
    """A checkpoint that may have to be written first."""

    @property
    def name(self) -> str:
        """As a report's configuration calls it."""
        ...

    def directory(self) -> Path:
        """Where it lies."""
        ...


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint of any family that the server reads."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def directory(self) -> Path:
        return self.path


@dataclass(frozen=True)
class RandomModel:
    """Random weights of a family's published size. `vocab_size` 0: the family's usual one.

    Raises ValueError for what the family does not have.
    """

    family: str = "wenet"
    size: str = "medium"
    heads: tuple[str, ...] = ()
    vocab_size: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r}; give one of {', '.join(FAMILIES)}")
        sizes = (_WENET_SIZE,) if self.family == "wenet" else tuple(SIZES)
        if self.size not in sizes:
            raise ValueError(f"size={self.size!r}, but {self.family} comes as {', '.join(sizes)}")
        if self.heads and self.family == "wenet" and self.heads != ("ctc",):
            raise ValueError(f"heads={','.join(self.heads)}, but wenet comes with ctc alone")
        if unknown := sorted(set(self.heads) - set(HEADS)):
            raise ValueError(f"heads={','.join(unknown)}; give some of {', '.join(HEADS)}")
        if self.vocab_size and self.vocab_size < LEAST_VOCABULARY:
            raise ValueError(f"vocab_size={self.vocab_size}; give {LEAST_VOCABULARY} or more")

    @property
    def name(self) -> str:
        heads = f", {'+'.join(self.heads)}" if self.heads else ""
        return f"random, {self.family} {self.size}{heads}"

    def write(self, directory: Path) -> Path:
        """Writes the checkpoint's files; returns the directory."""
        if self.family == "wenet":
            size = WenetSize(vocab_size=self.vocab_size) if self.vocab_size else WenetSize()
            return write_random_wenet(directory, size)
        return write_random_zipformer(
            directory,
            SIZES[self.size],
            heads=self.heads or HEADS,
            vocab_size=self.vocab_size or 500,
        )

    def directory(self) -> Path:
        """Written once; it goes when the program ends."""
        return _written(self)


@functools.cache
def _written(model: RandomModel) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="oasr-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return model.write(folder)


def add_random_arguments(parser: argparse.ArgumentParser) -> None:
    """--family, --size, --heads and --vocab-size."""
    parser.add_argument("--family", choices=FAMILIES, help="of random weights; default: wenet")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: medium")
    parser.add_argument("--heads", metavar="LIST", help=f"of {','.join(HEADS)}; default: all")
    parser.add_argument(
        "--vocab-size", type=_units, default=0, metavar="UNITS", help="default: the family's usual"
    )


def _units(text: str) -> int:
    """0 is how the program says that none were asked for, so none may be written."""
    number = int(text)
    if number < LEAST_VOCABULARY:
        raise argparse.ArgumentTypeError(f"{number} units; give {LEAST_VOCABULARY} or more")
    return number


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--checkpoint, or those of random weights."""
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="of any family")
    add_random_arguments(parser)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """--decoder, --chunk-size and --num-left-chunks."""
    parser.add_argument("--decoder", default="", help="default: the checkpoint's first search")
    parser.add_argument("--chunk-size", type=int, help="in the checkpoint's words")
    parser.add_argument("--num-left-chunks", type=int)


def chosen_settings(chosen: argparse.Namespace) -> dict[str, object]:
    """What of these was chosen, by the server's names."""
    given = {
        "decoder": chosen.decoder or None,
        "chunk_size": chosen.chunk_size,
        "num_left_chunks": chosen.num_left_chunks,
    }
    return {name: value for name, value in given.items() if value is not None}


def chosen_random_model(
    parser: argparse.ArgumentParser, chosen: argparse.Namespace, family: str = "wenet"
) -> RandomModel:
    """What was chosen; ends the program with a message for what the family does not have."""
    heads = tuple(chosen.heads.split(",")) if chosen.heads else ()
    try:
        return RandomModel(
            chosen.family or family, chosen.size or "medium", heads, chosen.vocab_size
        )
    except ValueError as error:
        parser.error(str(error))


def chosen_model(
    parser: argparse.ArgumentParser, chosen: argparse.Namespace, default: Model | None = None
) -> Model:
    """The checkpoint, or random weights; `default` where neither was chosen.

    A size without a family is one of the default's family.
    """
    is_random = any((chosen.family, chosen.size, chosen.heads, chosen.vocab_size))
    if chosen.checkpoint is not None:
        if is_random:
            parser.error("--checkpoint has its own family and size; give one or the other")
        return StoredModel(chosen.checkpoint)
    if default is not None and not is_random:
        return default
    family = default.family if isinstance(default, RandomModel) else "wenet"
    return chosen_random_model(parser, chosen, family)
