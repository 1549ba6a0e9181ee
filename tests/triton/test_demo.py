"""`make demo` prints what README.md shows."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.conftest import ROOT
from tests.guards import GUARD_S


def shown(text: str) -> list[str]:
    """From "Ready" to the final caption, without the seconds of the start."""
    (transcript,) = re.findall(r"^Ready after .*?  final  .*?$", text, re.DOTALL | re.MULTILINE)
    return re.sub(r"after [\d.]+ s", "after N s", transcript).splitlines()


def test_the_demo_prints_the_captions_that_the_readme_shows() -> None:
    command = [sys.executable, "-m", "oasr_backend.serve.demo"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_S, check=True
    )
    expected = shown((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(expected) > 5
    assert shown(done.stdout) == expected
    assert done.stdout.splitlines()[-1] == "Server stopped."
