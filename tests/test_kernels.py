"""Each Triton kernel against its PyTorch definition, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.guards import GUARD_S

pytestmark = pytest.mark.slow
CHECKS = ("norm", "outer_norm", "convolution", "attention", "subsampling", "best_tokens", "frames")


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    """The interpreter is chosen when a kernel is defined, so the checks run in a process of
    their own."""
    pytest.importorskip("triton", reason="kernels need the triton package; CI installs it")
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernel_checks", *CHECKS],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(line.split(": ", 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernel_gives_what_its_definition_gives(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == "equal"
