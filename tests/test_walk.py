"""docs/walk.md stays true: what it names exists, is used, and is numbered."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCUMENT = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w…/]+\.py):([\w.]+)`", DOCUMENT)
SOURCES = [*(ROOT / "oasr_backend").rglob("*.py"), *(ROOT / "model_repository").rglob("*.py")]
#: Triton calls it by name.
CALLED_FROM_OUTSIDE = {"execute"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def source_path(name: str) -> Path:
    return ROOT / name.replace("…", "oasr_backend")


def functions_of(path: Path) -> set[str]:
    """`function` and `Class.method` of a module."""
    found = set()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@functools.cache
def names_in_use() -> frozenset[str]:
    """Every name that the code reads; a definition alone is not a use."""
    nodes = [node for path in SOURCES for node in ast.walk(tree(path))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(attributes | {node.id for node in nodes if isinstance(node, ast.Name)})


@pytest.mark.parametrize(("file", "function"), NAMED, ids=lambda part: part)
def test_every_function_of_the_walk_exists(file: str, function: str) -> None:
    assert function in functions_of(source_path(file))


@pytest.mark.parametrize("function", sorted({function for _, function in NAMED}))
def test_every_function_of_the_walk_is_called(function: str) -> None:
    name = function.rpartition(".")[2]
    # `module(x)` is how PyTorch calls forward.
    assert name in names_in_use() | CALLED_FROM_OUTSIDE | {"forward"}


def test_the_steps_are_numbered_without_a_gap() -> None:
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 30 < len(numbers) < 48


def test_every_row_names_a_function() -> None:
    rows = [line for line in DOCUMENT.splitlines() if re.match(r"\| (\d+|[a-z])", line)]
    without = [row for row in rows if not re.search(r"`[\w…/]+\.py:[\w.]+`", row)]
    # The two header rows name the column itself.
    assert all("`file:function`" in row for row in without)
    assert len(rows) == len(NAMED) + len(without)
