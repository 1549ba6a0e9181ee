"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeVar

Value = TypeVar("Value")


async def in_thread(work: Callable[[], Value]) -> Value:
    """The call's value. When cancelled it waits for the call, so that its files may be closed."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def iterated(values: Iterator[Value]) -> AsyncGenerator[Value, None]:
    """The values; a thread makes each one when the caller asks for it."""
    while (value := await in_thread(lambda: next(values, None))) is not None:
        yield value
