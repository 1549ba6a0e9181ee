"""Checks of kernels in Triton's interpreter, which is chosen when a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.conftest import ROOT
from tests.guards import GUARD_S


def outcomes_of(module: str, checks: Sequence[str]) -> dict[str, str]:
    """What each check of a module, run in a process of its own, says: "equal" or the fault."""
    pytest.importorskip("triton", reason="kernels need the triton package; CI installs it")
    run = subprocess.run(
        [sys.executable, "-m", module, *checks],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(line.split(": ", 1) for line in run.stdout.splitlines())
