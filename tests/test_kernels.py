"""Each Triton kernel against its PyTorch definition, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest

from tests.interpreted import outcomes_of

pytestmark = pytest.mark.slow
CHECKS = ("norm", "outer_norm", "convolution", "attention", "subsampling", "best_tokens", "frames")


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    return outcomes_of("tests.kernel_checks", CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernel_gives_what_its_definition_gives(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == "equal"
