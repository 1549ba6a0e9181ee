"""The vocabulary of a WeNet directory: its units, and which of them is the blank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oasr_backend.checkpoints.files import existing
from oasr_backend.checkpoints.weights import Weights
from oasr_backend.checkpoints.wenet_config import section
from oasr_backend.checkpoints.wenet_tokenizer import read_tokenizer
from oasr_backend.errors import CheckpointError
from oasr_backend.tokenizer import Tokenizer

_BLANK = "<blank>"


def load_units(
    directory: Path, config: Mapping[str, Any], weights: Weights, *, vocab_size: int
) -> Tokenizer:
    """Raises CheckpointError unless `units.txt` has a unit for each output of the CTC head."""
    path = existing(directory, "units.txt")
    tokenizer = read_tokenizer(path, config)
    if tokenizer.vocab_size != vocab_size:
        raise CheckpointError(
            f"{path} names {tokenizer.vocab_size} units, but the CTC head of {weights.path} has "
            f"{vocab_size} outputs; take both files from one training"
        )
    return tokenizer


def find_blank(directory: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """The id of `<blank>` in units.txt; `ctc_blank_id` where there is no such unit.

    Raises CheckpointError where the two differ, or neither is there.
    """
    path = directory / "units.txt"
    stated = section(config, "ctc_conf").get("ctc_blank_id")
    units = tokenizer.pieces(range(tokenizer.vocab_size))
    if _BLANK in units:
        blank_id = units.index(_BLANK)
        if stated not in (None, blank_id):
            raise CheckpointError(
                f"train.yaml: ctc_conf.ctc_blank_id={stated!r}, but {_BLANK} has id {blank_id} in "
                f"{path}; take both files from one training"
            )
        return blank_id
    if not isinstance(stated, int) or not 0 <= stated < tokenizer.vocab_size:
        raise CheckpointError(
            f"{path} has no unit {_BLANK}, and ctc_conf.ctc_blank_id={stated!r} of train.yaml is "
            f"none of the ids 0 .. {tokenizer.vocab_size - 1}; say there which unit is the blank"
        )
    return stated
