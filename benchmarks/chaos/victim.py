"""A client process that speaks in several streams until it is killed. Argument: the server."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from benchmarks.chaos.caller import DEADLINE_S, request
from benchmarks.chaos.speech import Clip, read_clips
from benchmarks.load import wire

READY = b"ready\n"
_PR_SET_PDEATHSIG = 1
_NUM_STREAMS = 6
_CHUNK_MS = 200.0


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the parent ended before the victim began")


async def speak_forever(url: str) -> None:
    """Says READY once every stream is open."""
    channel, clips = wire.InferChannel(url), read_clips()
    # Another process has the same counter, so the ids are strings of its own.
    ids = [f"victim-{os.getpid()}-{index}" for index in range(_NUM_STREAMS)]
    window_S = clips[0].samples_S[:8000]
    starts = [request(stream_id, window_S, flags=wire.START) for stream_id in ids]
    await asyncio.gather(*(channel.call(start, DEADLINE_S) for start in starts))
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    await asyncio.gather(*(_speak(channel, stream_id, clips) for stream_id in ids))


async def _speak(channel: wire.InferChannel, stream_id: str, clips: Sequence[Clip]) -> None:
    while True:
        for clip in clips:
            for chunk in clip.chunks(_CHUNK_MS):
                await channel.call(request(stream_id, chunk), DEADLINE_S)
                await asyncio.sleep(_CHUNK_MS / 1000)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(speak_forever(sys.argv[1]))
