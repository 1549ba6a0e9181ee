"""docs/triton_log.md names real tests, and accounts for every line."""

from __future__ import annotations

import re

from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "triton_log.md").read_text(encoding="utf-8")
ROWS = [line.strip("| \n").split("|") for line in TEXT.splitlines() if line.startswith("| ")]


def test_every_named_test_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 60
    for file, function in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {function}\(", source, re.MULTILINE), (
            f"{file}::{function}"
        )


def test_every_row_has_a_symptom_and_what_happens_here() -> None:
    assert len(ROWS) > 65
    for row in ROWS:
        assert all(cell.strip() for cell in row[:2]), row
