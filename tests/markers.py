"""The rules for `live` tests, for the time limit of `slow` ones, and for sharing a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

LIVE_FOLDER = Path(__file__).parent / "triton"
#: Each of these fixtures is a running tritonserver.
LIVE_FIXTURES = frozenset({"live_server", "variant_server", "echo_server", "doomed_server"})
#: In seconds. A slow test may meet a machine that is many times slower than a quiet one.
SLOW_TIMEOUT_S = 7200


def is_live(path: Path, fixtures: frozenset[str]) -> bool:
    """Whether a test in `path` that uses `fixtures` needs a tritonserver by one of the rules."""
    return LIVE_FOLDER in path.parents or bool(fixtures & LIVE_FIXTURES)


def automatic_marks(item: pytest.Item) -> Iterator[pytest.MarkDecorator]:
    """`live` by the rules; for what is marked `slow`, a longer time limit; a group of workers.

    A file is one group, for its fixtures. Slow live tests have servers of their own, so each of
    them goes where a worker is free.
    """
    rule = is_live(item.path, frozenset(getattr(item, "fixturenames", ())))
    live = rule or item.get_closest_marker("live") is not None
    slow = item.get_closest_marker("slow") is not None
    if rule:
        yield pytest.mark.live
    if slow:
        yield pytest.mark.timeout(SLOW_TIMEOUT_S)
    if not (live and slow):
        yield pytest.mark.xdist_group(str(item.path))
