"""Code of the documents, run as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.conftest import ROOT


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def run_document(name: str) -> dict[str, Any]:
    """Executes the Python blocks of docs/`name` in order, as one module; returns its names."""
    path = ROOT / "docs" / name
    names: dict[str, Any] = {"__name__": f"docs.{path.stem}"}
    for block in python_blocks(path):
        exec(compile(block, str(path), "exec"), names)
    return names
