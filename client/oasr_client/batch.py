"""Many sources through one client: at most `parallel` streams at a time, each failing alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from oasr_client.audio import rechunked, seconds
from oasr_client.errors import (
    ClientError,
    DeadlineError,
    OverloadedError,
    ServerUnavailableError,
    StreamEndedError,
    StreamLostError,
)
from oasr_client.microphone import microphone_chunks
from oasr_client.recording import Recording
from oasr_client.report import Heard, Report
from oasr_client.session import StreamUpdate
from oasr_client.signals import stopping_on_interrupt
from oasr_client.sources import AudioSource
from oasr_client.streaming import AsyncStreamingClient
from oasr_client.threads import in_thread, iterated
from oasr_client.transcribe import Pace, transcribe, transcribe_live

MICROPHONE_NAME = "microphone"
#: These errors end a stream whose audio is right.
_CUTS = (StreamLostError, ServerUnavailableError, OverloadedError, DeadlineError)


@dataclass(frozen=True)
class Batch:
    sources: Sequence[AudioSource]
    opened: Callable[[AudioSource], Recording]
    pace: Pace
    parallel: int = 1


async def transcribe_files(
    client: AsyncStreamingClient, batch: Batch, report: Report
) -> dict[AudioSource, str]:
    """The final texts of the sources that went well; the others are told to `report`.

    Returns, or raises when cancelled, with no stream left open on the server.
    """
    texts: dict[AudioSource, str] = {}
    free = asyncio.Semaphore(batch.parallel)

    async def one(source: AudioSource) -> None:
        async with free:
            text = await _transcribe_file(client, source, batch=batch, report=report)
        if text is not None:
            texts[source] = text

    await _all_or_none(one(source) for source in batch.sources)
    return texts


async def _all_or_none(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits until all are done. One that raises cancels the others and waits for their end."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        # Streams have to send END before the client is closed.
        endings = await asyncio.gather(*tasks, return_exceptions=True)
    for ending in endings:
        if ending is not None and not isinstance(ending, asyncio.CancelledError):
            raise ending


async def _transcribe_file(
    client: AsyncStreamingClient, source: AudioSource, *, batch: Batch, report: Report
) -> str | None:
    """The source's final text, or None where it failed."""
    last: Heard | None = None
    try:
        with await in_thread(lambda: batch.opened(source)) as recording:

            def on_update(update: StreamUpdate, num_samples: int) -> None:
                nonlocal last
                last = Heard(source, update, num_samples, recording.num_samples)
                report.heard(last)

            chunks = iterated(rechunked(recording.blocks(), batch.pace.chunk_ms))
            try:
                final = await transcribe(client, chunks, pace=batch.pace, on_update=on_update)
            except _CUTS as error:
                if last is None and not isinstance(error, StreamEndedError):
                    raise
                raise _with_length(error, recording.num_samples) from error
    except ClientError as error:
        report.failed(source, error, last)
        return None
    if last is None or not last.num_samples:
        report.warned(source, "holds no samples; check that the recording is complete")
    for words in recording.warnings:
        report.warned(source, words)
    return final.text


def _with_length(error: ClientError, num_samples: int | None) -> ClientError:
    """The error, to which the source's length is added: its stream could not know that."""
    length = "an unknown length" if num_samples is None else f"{seconds(num_samples):.2f} s"
    return type(error)(f"of {length} in all, {error}")


async def transcribe_microphone(
    client: AsyncStreamingClient, pace: Pace, report: Report
) -> str | None:
    """Runs until Ctrl-C ends the stream (a second one cancels it). Returns None if it failed."""
    stop = asyncio.Event()
    last: Heard | None = None

    def on_update(update: StreamUpdate, num_samples: int) -> None:
        nonlocal last
        last = Heard(MICROPHONE_NAME, update, num_samples, None)
        report.heard(last)

    try:
        with stopping_on_interrupt(stop):
            chunks = microphone_chunks(pace.chunk_ms, stop)
            final = await transcribe_live(client, chunks, on_update=on_update)
    except ClientError as error:
        report.failed(MICROPHONE_NAME, error, last)
        return None
    return final.text
