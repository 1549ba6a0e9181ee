"""The vocabulary of a WeNet directory: its units, and which of them is the blank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasr_backend.checkpoints.wenet.config import section
from oasr_backend.checkpoints.wenet.files import UNITS, needed
from oasr_backend.checkpoints.wenet.tokenizer import read_tokenizer
from oasr_backend.errors import CheckpointError
from oasr_backend.text.tokenizer import Tokenizer

_BLANK = "<blank>"


@dataclass(frozen=True)
class Units:
    """`path` is the file of units."""

    path: Path
    tokenizer: Tokenizer
    blank_id: int


def read_units(directory: Path, config: Mapping[str, Any]) -> Units:
    """`config` is train.yaml. Raises CheckpointError for units that cannot be read or served."""
    path = needed(directory, UNITS)
    tokenizer = read_tokenizer(path, config)
    return Units(path, tokenizer, _find_blank(path, config, tokenizer))


def _find_blank(path: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """The id of `<blank>` in units.txt; `ctc_blank_id` where there is no such unit.

    Raises CheckpointError where two ids differ, or there is none.
    """
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
