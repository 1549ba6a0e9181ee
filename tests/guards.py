"""Waits for events that must come; the limit only guards against waiting for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

#: In seconds. A machine that is only busy never takes so long.
GUARD_S = 600.0
_LOOK_EVERY_S = 0.1


def wait_until(condition: Callable[[], bool], *, what: str) -> None:
    """Raises AssertionError with `what` when the guard's time is over."""
    deadline_s = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {GUARD_S:g} s: {what}"
        time.sleep(_LOOK_EVERY_S)
