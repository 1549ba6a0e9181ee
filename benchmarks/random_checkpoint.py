"""A checkpoint directory with random weights, of the size that figures are quoted for.

What it hears means nothing, at the speed of one that was trained. Without options it is WeNet's
common U2 Conformer.

    python -m benchmarks.random_checkpoint DIR
    python -m benchmarks.random_checkpoint DIR --family zipformer --size medium --heads ctc
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.models import add_random_arguments, chosen_random_model
from benchmarks.random_wenet import WenetSize as Size
from benchmarks.random_wenet import write_random_wenet as write_random_checkpoint

__all__ = ["Size", "main", "write_random_checkpoint"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path)
    add_random_arguments(parser)
    chosen = parser.parse_args(arguments)
    chosen_random_model(parser, chosen).write(chosen.directory)


if __name__ == "__main__":
    main()
