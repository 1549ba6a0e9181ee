"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeVar

Value = TypeVar("Value")


async def in_thread(work: Callable[[], Value]) -> Value:
    """Its value. Cancelled, waits for it first: what it works on may then be closed."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def iterated(values: Iterator[Value]) -> AsyncGenerator[Value, None]:
    """The values, each made in a thread when it is asked for."""
    while (value := await in_thread(lambda: next(values, None))) is not None:
        yield value
