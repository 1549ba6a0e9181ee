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
from oasr_backend.text.tokenizer import Tokenizer

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

    Raises CheckpointError where two ids differ, or there is none.
    """
    path = directory / "units.txt"
    stated = section(config, "ctc_conf").get("ctc_blank_id")
    units = tokenizer.pieces(range(tokenizer.vocab_size))
    blanks = [number for number, unit in enumerate(units) if unit == _BLANK]
    if len(blanks) > 1:
        raise CheckpointError(
            f"{path} names {_BLANK} twice, with the ids {blanks[0]} and {blanks[1]}; it is one unit"
        )
    if blanks:
        _check_blank("ctc_conf.ctc_blank_id", stated, blanks[0], f"has id {blanks[0]} in {path}")
    blank_id = blanks[0] if blanks else _stated_blank(stated, path, tokenizer.vocab_size)
    special = section(config, "tokenizer_conf.special_tokens").get(_BLANK)
    _check_blank(f"special_tokens.{_BLANK}", special, blank_id, f"is served with id {blank_id}")
    return blank_id


def _check_blank(option: str, value: object, blank_id: int, found: str) -> None:
    if value not in (None, blank_id):
        raise CheckpointError(
            f"train.yaml: {option}={value!r}, but {_BLANK} {found}; take both files from one "
            "training"
        )


def _stated_blank(stated: object, path: Path, vocab_size: int) -> int:
    if not isinstance(stated, int) or not 0 <= stated < vocab_size:
        raise CheckpointError(
            f"{path} has no unit {_BLANK}, and ctc_conf.ctc_blank_id={stated!r} of train.yaml is "
            f"none of the ids 0 .. {vocab_size - 1}; say there which unit is the blank"
        )
    return stated
