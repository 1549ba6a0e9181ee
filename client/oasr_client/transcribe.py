"""A whole recording or a live source through one stream, at the source's pace or at full speed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from oasr_client.audio import chunk_samples
from oasr_client.mono import SAMPLE_RATE_HZ, Mono
from oasr_client.session import StreamUpdate
from oasr_client.streaming import AsyncStreamingClient

#: It is called with each answer and the number of samples that the answer covers.
OnUpdate = Callable[[StreamUpdate, int], None]


@dataclass(frozen=True)
class Pace:
    """`is_realtime` holds each chunk back until a speaker would have said its last sample.

    Raises InvalidAudioError for a chunk that is under one sample or over a day long.
    """

    chunk_ms: float = 640.0
    is_realtime: bool = False

    def __post_init__(self) -> None:
        chunk_samples(self.chunk_ms)

    def wait_s(self, num_samples: int, *, elapsed_s: float) -> float:
        """Seconds until the first `num_samples` of a recording exist, `elapsed_s` into it."""
        if not self.is_realtime:
            return 0.0
        return max(0.0, num_samples / SAMPLE_RATE_HZ - elapsed_s)


async def transcribe(
    client: AsyncStreamingClient,
    chunks: AsyncGenerator[Mono, None],
    *,
    pace: Pace,
    on_update: OnUpdate,
) -> StreamUpdate:
    """Streams at least one chunk of 16 kHz samples; the last carries END. Raises ClientError."""
    clock = asyncio.get_running_loop().time
    started_s = clock()
    num_sent = 0

    async def is_due(chunk: Mono) -> None:
        nonlocal num_sent
        num_sent += chunk.size
        await asyncio.sleep(pace.wait_s(num_sent, elapsed_s=clock() - started_s))

    async with contextlib.aclosing(chunks), client.stream() as stream:
        last = await anext(chunks)
        async for following in chunks:
            await is_due(last)
            on_update(await stream.send(last), num_sent)
            last = following
        await is_due(last)
        final = await stream.finish(last)
    on_update(final, num_sent)
    return final


async def transcribe_live(
    client: AsyncStreamingClient, chunks: AsyncGenerator[Mono, None], *, on_update: OnUpdate
) -> StreamUpdate:
    """Streams chunks as they come until the source ends, and closes it. Raises ClientError."""
    num_sent = 0
    async with contextlib.aclosing(chunks), client.stream() as stream:
        async for chunk in chunks:
            num_sent += chunk.size
            on_update(await stream.send(chunk), num_sent)
        final = await stream.finish()
    on_update(final, num_sent)
    return final
