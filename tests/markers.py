"""Which tests are `live` and how long a `slow` one may take: rules instead of lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

LIVE_FOLDER = Path(__file__).parent / "triton"
#: Each of them is a running tritonserver.
LIVE_FIXTURES = frozenset({"live_server", "variant_server", "echo_server", "doomed_server"})
#: Seconds. A slow test may meet a machine that is many times slower than a quiet one.
SLOW_TIMEOUT_S = 7200


def is_live(path: Path, fixtures: frozenset[str]) -> bool:
    """Whether a test in `path` that uses `fixtures` needs a tritonserver by one of the rules."""
    return LIVE_FOLDER in path.parents or bool(fixtures & LIVE_FIXTURES)


def automatic_marks(item: pytest.Item) -> Iterator[pytest.MarkDecorator]:
    """`live` by the rules; for what is marked `slow`, a longer time limit."""
    fixtures = frozenset(getattr(item, "fixturenames", ()))
    if is_live(item.path, fixtures):
        yield pytest.mark.live
    if item.get_closest_marker("slow"):
        yield pytest.mark.timeout(SLOW_TIMEOUT_S)
