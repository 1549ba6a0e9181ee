"""The default microphone as chunks, through the optional `sounddevice` package."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from oasr_client.audio import chunk_samples
from oasr_client.errors import ClientError
from oasr_client.mono import SAMPLE_RATE_HZ, Mono


async def microphone_chunks(chunk_ms: float, stop: asyncio.Event) -> AsyncGenerator[Mono, None]:
    """Mono 16 kHz chunks until `stop` is set. Raises ClientError without a usable microphone."""
    device = _sounddevice()
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Mono | None] = asyncio.Queue()

    def hear(block_N1: Any, *_unused: object) -> None:
        # PortAudio's thread calls this and reuses the buffer.
        loop.call_soon_threadsafe(queue.put_nowait, np.array(block_N1[:, 0], np.float32))

    stopping = asyncio.ensure_future(_end_on(stop, queue))
    try:
        with _open(device, chunk_ms, hear):
            while (chunk := await queue.get()) is not None:
                yield chunk
    finally:
        stopping.cancel()


async def _end_on(stop: asyncio.Event, queue: asyncio.Queue[Mono | None]) -> None:
    await stop.wait()
    queue.put_nowait(None)


def _open(device: Any, chunk_ms: float, hear: Any) -> Any:
    try:
        return device.InputStream(
            samplerate=SAMPLE_RATE_HZ,
            channels=1,
            dtype="float32",
            blocksize=chunk_samples(chunk_ms),
            callback=hear,
        )
    except device.PortAudioError as error:
        raise ClientError(
            f"no microphone can be opened: {error}; check the input device"
        ) from error


def _sounddevice() -> Any:
    try:
        import sounddevice  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ClientError(
            "--microphone needs the package sounddevice; pip install sounddevice"
        ) from error
    except OSError as error:
        raise ClientError(
            f"sounddevice finds no PortAudio library ({error}); install libportaudio2"
        ) from error
    return sounddevice
