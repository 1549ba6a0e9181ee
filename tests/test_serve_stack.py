"""Whether untouched stack counts as memory: there a server keeps the stack of its caller."""

from __future__ import annotations

from pathlib import Path

import pytest

from oasr_backend.serve import stack
from oasr_backend.serve.checks import check_stack


@pytest.mark.parametrize(("mode", "is_strict"), [("0\n", False), ("1\n", False), ("2\n", True)])
def test_only_strict_accounting_reserves_stacks_whole(
    tmp_path: Path, mode: str, is_strict: bool
) -> None:
    (tmp_path / "overcommit_memory").write_text(mode)
    assert stack.is_reserved_whole(tmp_path / "overcommit_memory") == is_strict


def test_a_kernel_that_does_not_say_reserves_nothing(tmp_path: Path) -> None:
    assert not stack.is_reserved_whole(tmp_path / "absent")


def test_under_strict_accounting_the_limit_stays_and_the_check_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine-wide setting, which no test may change."""
    for module in ("stack", "checks"):
        monkeypatch.setattr(f"oasr_backend.serve.{module}.is_reserved_whole", lambda: True)
    assert stack.with_deep_stacks() == []
    (problem,) = check_stack()
    assert "vm.overcommit_memory is 2" in problem.message
    assert "sysctl vm.overcommit_memory=0" in problem.remedy
