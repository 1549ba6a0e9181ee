"""A client process that speaks in several streams until it is killed. Argument: the server."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys

from benchmarks.load import wire
from tests.chaos.caller import request
from tests.chaos.speech import read_clips

_PR_SET_PDEATHSIG = 1
_NUM_STREAMS = 6
_CHUNK_MS = 200.0
_DEADLINE_S = 20.0


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the parent ended before the victim began")


async def speak_forever(url: str) -> None:
    channel = wire.InferChannel(url)
    # Another process has the same counter, so the ids are strings of its own.
    streams = [_speak(channel, f"victim-{os.getpid()}-{index}") for index in range(_NUM_STREAMS)]
    print("ready", flush=True)
    await asyncio.gather(*streams)


async def _speak(channel: wire.InferChannel, stream_id: str) -> None:
    flags = wire.START
    while True:
        for clip in read_clips():
            for chunk in clip.chunks(_CHUNK_MS):
                await channel.call(request(stream_id, chunk, flags=flags), _DEADLINE_S)
                flags = b""
                await asyncio.sleep(_CHUNK_MS / 1000)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(speak_forever(sys.argv[1]))
