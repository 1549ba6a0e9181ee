"""A lock that is handed on in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class FairLock:
    """A context manager; not re-entrant.

    With Python's own locks, a thread that releases and takes again at once beats every waiter: one
    that steps without a pause would keep new requests out for as long as it has work.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiters: deque[threading.Lock] = deque()
        self._is_held = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._is_held:
                self._is_held = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiters.append(ticket)
        # Released by the holder before us, who leaves the lock held.
        ticket.acquire()

    def __exit__(self, *_exc: object) -> None:
        with self._guard:
            if self._waiters:
                self._waiters.popleft().release()
            else:
                self._is_held = False

    @contextmanager
    def released(self) -> Iterator[None]:
        """Lets the others in while the holder does what needs no lock, then waits its turn."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
