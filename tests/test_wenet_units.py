"""units.txt and the output layer agree, and the blank is the unit of that name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oasr_backend.checkpoints import open_checkpoint
from tests.checkpoint_helpers import copy_golden, edit_config, refusal


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return copy_golden(tmp_path)


def test_units_and_outputs_must_agree_and_both_numbers_are_told(directory: Path) -> None:
    path = directory / "units.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:50]) + "\n", encoding="utf-8")
    refusal(directory, f"{path} names 50 units", f"{directory / 'final.pt'} has 96 outputs")


def test_a_line_inserted_into_units_txt_is_refused(directory: Path) -> None:
    path = directory / "units.txt"
    symbols = [line.split()[0] for line in path.read_text(encoding="utf-8").splitlines()]
    symbols.insert(10, "stray")
    numbered = [f"{symbol} {number}" for number, symbol in enumerate(symbols)]
    path.write_text("\n".join(numbered) + "\n", encoding="utf-8")
    refusal(directory, "names 97 units", "has 96 outputs")


def exchange_units(directory: Path, first: str, second: str) -> None:
    """The two change places, so that each has the other's id."""
    path = directory / "units.txt"
    other = {first: second, second: first}
    lines = [line.split(" ") for line in path.read_text(encoding="utf-8").splitlines()]
    text = "".join(f"{other.get(symbol, symbol)} {number}\n" for symbol, number in lines)
    path.write_text(text, encoding="utf-8")


def forget_blank_id(config: dict[str, Any]) -> None:
    del config["ctc_conf"]["ctc_blank_id"]


def test_the_blank_is_the_unit_of_that_name(directory: Path) -> None:
    exchange_units(directory, "<blank>", "ca")
    edit_config(directory, forget_blank_id)
    assert open_checkpoint(directory).load().blank_id == 2


def test_a_blank_id_that_differs_from_the_units_is_refused_with_both(directory: Path) -> None:
    edit_config(directory, lambda config: config["ctc_conf"].update(ctc_blank_id=5))
    refusal(directory, "ctc_blank_id=5", "<blank> has id 0", str(directory / "units.txt"))


def test_a_special_blank_that_differs_from_the_units_is_refused_with_both(directory: Path) -> None:
    def name_blank(number: int) -> None:
        special = {"special_tokens": {"<blank>": number}}
        edit_config(directory, lambda config: config["tokenizer_conf"].update(special))

    name_blank(7)
    refusal(directory, "special_tokens.<blank>=7", "id 0")
    name_blank(0)
    assert open_checkpoint(directory).load().blank_id == 0


def test_a_blank_that_units_name_twice_is_refused_with_both_ids(directory: Path) -> None:
    path = directory / "units.txt"
    path.write_text(path.read_text(encoding="utf-8").replace("ca 2\n", "<blank> 2\n"), "utf-8")
    refusal(directory, f"{path} names <blank> twice", "ids 0 and 2")


def test_units_without_a_blank_take_that_of_train_yaml(directory: Path) -> None:
    exchange_units(directory, "<blank>", "<blk>")
    assert open_checkpoint(directory).load().blank_id == 0
    edit_config(directory, lambda config: config["ctc_conf"].update(ctc_blank_id=96))
    refusal(directory, "no unit <blank>", "ctc_blank_id=96", "0 .. 95")
    edit_config(directory, forget_blank_id)
    refusal(directory, "no unit <blank>", "ctc_blank_id=None")
