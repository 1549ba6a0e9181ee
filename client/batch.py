"""Many sources through one client: at most `parallel` streams at a time, each failing alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oasr_client.audio import rechunked, seconds
from oasr_client.errors import ClientError, StreamEndedError
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
            try:
                texts[source] = await _transcribe_file(client, source, batch=batch, report=report)
            except ClientError as error:
                report.failed(source, error)

    # Cancelled, plain gather would end with the first task, and the client close before the
    # others have sent END.
    endings = await asyncio.gather(*map(one, batch.sources), return_exceptions=True)
    for ending in endings:
        if ending is not None:
            raise ending
    return texts


async def _transcribe_file(
    client: AsyncStreamingClient, source: AudioSource, *, batch: Batch, report: Report
) -> str:
    num_heard = 0
    with await in_thread(lambda: batch.opened(source)) as recording:

        def on_update(update: StreamUpdate, num_samples: int) -> None:
            nonlocal num_heard
            num_heard = num_samples
            report.heard(Heard(source, update, num_samples, recording.num_samples))

        chunks = iterated(rechunked(recording.blocks(), batch.pace.chunk_ms))
        try:
            final = await transcribe(client, chunks, pace=batch.pace, on_update=on_update)
        except StreamEndedError as error:
            raise _with_length(error, recording.num_samples) from error
    if not num_heard:
        report.warned(source, "holds no samples; check that the recording is complete")
    for words in recording.warnings:
        report.warned(source, words)
    return final.text


def _with_length(error: StreamEndedError, num_samples: int | None) -> StreamEndedError:
    """The error with what its stream could not know: how much there was to hear."""
    length = "an unknown length" if num_samples is None else f"{seconds(num_samples):.2f} s"
    return StreamEndedError(f"of {length} in all, {error}")


async def transcribe_microphone(
    client: AsyncStreamingClient, pace: Pace, report: Report
) -> str | None:
    """Until Ctrl-C, which ends the stream properly (a second one cancels); None if it failed."""
    stop = asyncio.Event()
    try:
        with stopping_on_interrupt(stop):
            final = await transcribe_live(
                client,
                microphone_chunks(pace.chunk_ms, stop),
                on_update=lambda update, num: report.heard(
                    Heard(MICROPHONE_NAME, update, num, None)
                ),
            )
    except ClientError as error:
        report.failed(MICROPHONE_NAME, error)
        return None
    return final.text
