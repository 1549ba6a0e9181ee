"""Turns the first Ctrl-C or SIGTERM into a cancellation, so that streams have time for END."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

#: A shell's exit status is this plus N for a process that signal N ended.
SIGNALLED = 128


async def until_signalled(work: Coroutine[Any, Any, int]) -> int:
    """The work's status, or 130 after SIGINT, 143 after SIGTERM; later signals change nothing."""
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def cancel(number: int) -> None:
        if not received:
            task.cancel()
        received.append(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return SIGNALLED + received[0]


@contextlib.contextmanager
def stopping_on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C sets `stop`, a second one cancels the running task."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
