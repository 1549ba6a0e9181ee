"""`oasr-serve` beside its server: waits until it is ready, stops it at a signal or a lost model."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from oasr_backend.serve.process import TritonServer
from oasr_backend.serve.stubs import LOOK_INTERVAL_S, HeartbeatWatch, StubWatch

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """A signal asks for the end. As with KeyboardInterrupt, no `except Exception` catches it."""


class _StopSignals:
    """Raises StopRequested at the first signal; those after it change nothing."""

    def __init__(self) -> None:
        self._has_come = self._is_held = False
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds a signal that comes in the block, and raises it at the block's end."""
        self._is_held = True
        yield
        self._is_held = False
        if self._has_come:
            raise StopRequested

    def ignore(self) -> None:
        self._has_come = True

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self._has_come = not self._has_come, True
        if is_first and not self._is_held:
            raise StopRequested


def watch_over(
    server: TritonServer,
    *,
    ready_timeout_s: float,
    hang_limit_s: float,
    on_ready: Callable[[], None],
) -> int:
    """Run `server` until it ends or a signal asks for it; returns the exit status for the shell.

    That is 0 after a signal. Raises ServerError when the server is not ready after
    `ready_timeout_s`, when the process of one of its models dies or when a model has stood still
    for `hang_limit_s`; each time the server is then stopped.
    """
    signals = _StopSignals()
    try:
        # Between the fork and its process id nothing could stop the server.
        with signals.held():
            server.start()
        server.wait_ready(ready_timeout_s)
        on_ready()
        status = _wait(server, hang_limit_s)
    except StopRequested:
        return 0
    finally:
        signals.ignore()
        server.stop()
    return status if status >= 0 else 128 - status


def _wait(server: TritonServer, hang_limit_s: float) -> int:
    stubs = StubWatch(server.pid)
    heartbeats = HeartbeatWatch(server.metrics_page, hang_limit_s)
    while True:
        try:
            return server.wait(LOOK_INTERVAL_S)
        except subprocess.TimeoutExpired:
            stubs.look()
            heartbeats.look()
