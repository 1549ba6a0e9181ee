"""No test judges how fast the machine is: an elapsed time has no upper bound in seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.guards import GUARD_S

CLOCKS = {"monotonic", "perf_counter", "time", "process_time", "thread_time"}
WAITS = {"communicate", "join", "run", "urlopen", "wait", "wait_ready", "wait_until"}
#: These calls take the limit as their first argument.
WAITS_BY_POSITION = {"join", "wait", "wait_ready"}
#: A wait that is shorter is a judgement, unless the test wants it to be over in vain.
SHORTEST_GUARD_S = 60
# The guard itself is the only bound.
FILES = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "guards.py"]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def reads_a_clock(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Call) and name_of(one) in CLOCKS for one in ast.walk(node))


def bounds_time_from_above(comparison: ast.Compare) -> bool:
    sides = pairwise([comparison.left, *comparison.comparators])
    for (left, right), operator in zip(sides, comparison.ops, strict=True):
        smaller, larger = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
        is_order = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        if is_order and reads_a_clock(smaller) and not reads_a_clock(larger):
            return True
    return False


def judgements(tree: ast.AST) -> Iterator[int]:
    """The lines that assert that a time on a clock is below some value."""
    for node in ast.walk(tree):
        compared = ast.walk(node.test) if isinstance(node, ast.Assert) else ()
        if any(isinstance(one, ast.Compare) and bounds_time_from_above(one) for one in compared):
            yield node.lineno


def limits_of(call: ast.Call) -> list[ast.expr]:
    limits = [one.value for one in call.keywords if one.arg in ("timeout", "timeout_s")]
    return limits + (call.args[:1] if name_of(call) in WAITS_BY_POSITION else [])


def is_short(limit: ast.expr) -> bool:
    value = limit.value if isinstance(limit, ast.Constant) else None
    return isinstance(value, int | float) and value < SHORTEST_GUARD_S


def outside_raises(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes outside blocks that a test expects to fail, which need no patience."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.With) and "raises" in ast.unparse(child.items[0])):
            yield from outside_raises(child)


def short_waits(tree: ast.AST) -> Iterator[int]:
    """Lines of waits with a short limit, where the test does not expect that it is over."""
    for node in outside_raises(tree):
        if isinstance(node, ast.Call) and name_of(node) in WAITS:
            yield from (node.lineno for limit in limits_of(node) if is_short(limit))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_asserted_to_be_fast(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert list(judgements(tree)) == []
    assert list(short_waits(tree)) == []


def test_what_judges_a_machine_is_found() -> None:
    source = """
assert time.monotonic() - begin_s < 5.0
assert 0.5 <= time.monotonic() - begin_s < 6.0
assert time.monotonic() - begin_s >= 0.5
assert PROMPT_S > time.monotonic() - begin_s
process.communicate(timeout=20)
thread.join(GUARD_S)
with pytest.raises(ServerError):
    server.wait_ready(0.5)
"""
    tree = ast.parse(source)
    assert list(judgements(tree)) == [2, 3, 5]
    assert list(short_waits(tree)) == [6]
    assert GUARD_S >= SHORTEST_GUARD_S
