"""Steps that go on at the same time: their places, and what a thread without work waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from oasr_backend.streaming.fair_lock import FairLock


@dataclass
class _Ticket:
    """A thread in line; `is_called` is released when it may go to `lane`."""

    is_called: threading.Lock = field(default_factory=threading.Lock)
    lane: int = -1


class Lanes:
    """Numbers 0 .. count - 1, each with one thread at most, handed on in the order of arrival."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._guard = threading.Lock()
        self._resting = FairLock()
        # The last one given back is the next one taken: its memory is warm.
        self._free = list(reversed(range(count)))
        self._waiters: deque[_Ticket] = deque()

    @contextmanager
    def one(self) -> Iterator[int]:
        """A lane of one's own."""
        lane = self._take()
        try:
            yield lane
        finally:
            self._give_back(lane)

    @contextmanager
    def all(self) -> Iterator[None]:
        """Every lane: no step is going on. Those who ask at the same time do not block each other.

        A thread that has a lane must not ask.
        """
        with self._resting, ExitStack() as lanes:
            for _ in range(self.count):
                lanes.enter_context(self.one())
            yield

    def _take(self) -> int:
        with self._guard:
            if self._free:
                return self._free.pop()
            ticket = _Ticket()
            ticket.is_called.acquire()
            self._waiters.append(ticket)
        ticket.is_called.acquire()
        return ticket.lane

    def _give_back(self, lane: int) -> None:
        with self._guard:
            if not self._waiters:
                self._free.append(lane)
                return
            ticket = self._waiters.popleft()
            ticket.lane = lane
            ticket.is_called.release()


class News:
    """Counts what happens, so that a thread that has looked in vain can wait until it may pay."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0

    def tell(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait_past(self, count: int, *, timeout_s: float) -> None:
        """Returns once more has happened than `count`, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.count != count, timeout_s)
