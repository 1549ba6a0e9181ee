"""Many sources through one client: at most `parallel` streams at a time, each failing alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oasr_client.audio import Mono
from oasr_client.errors import ClientError
from oasr_client.microphone import microphone_chunks
from oasr_client.report import Heard, Report
from oasr_client.signals import stopping_on_interrupt
from oasr_client.streaming import AsyncStreamingClient
from oasr_client.transcribe import Pace, transcribe, transcribe_live

MICROPHONE_NAME = "microphone"


@dataclass(frozen=True)
class Batch:
    files: Sequence[Path]
    read: Callable[[Path], Mono]
    pace: Pace
    parallel: int = 1


async def transcribe_files(
    client: AsyncStreamingClient, batch: Batch, report: Report
) -> dict[Path, str]:
    """The final texts of the files that went well; the others are told to `report`.

    Returns, or raises when cancelled, with no stream left open on the server.
    """
    texts: dict[Path, str] = {}
    free = asyncio.Semaphore(batch.parallel)

    async def one(path: Path) -> None:
        async with free:
            try:
                texts[path] = await _transcribe_file(client, path, batch=batch, report=report)
            except ClientError as error:
                report.failed(str(path), error)

    # Cancelled, plain gather would end with the first task, and the client close before the
    # others have sent END.
    endings = await asyncio.gather(*(one(path) for path in batch.files), return_exceptions=True)
    for ending in endings:
        if ending is not None:
            raise ending
    return texts


async def _transcribe_file(
    client: AsyncStreamingClient, path: Path, *, batch: Batch, report: Report
) -> str:
    samples = await asyncio.to_thread(batch.read, path)
    if samples.size == 0:
        report.warned(str(path), "holds no samples; check that the recording is complete")
    final = await transcribe(
        client,
        samples,
        pace=batch.pace,
        on_update=lambda update, num: report.heard(Heard(str(path), update, num, samples.size)),
    )
    return final.text


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
