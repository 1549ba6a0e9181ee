"""Many callers, each with one streaming gRPC call that it keeps open."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from benchmarks.load import wire
from oasr_backend.serve.process import TritonServer, local_settings
from tests.conftest import MODEL_REPOSITORY
from tests.guards import GUARD_S

_NUM_CALLERS = 256
_SECONDS = 5.0
_PAUSE_S = 0.3


def test_streaming_calls_that_stay_open_do_not_end_the_server() -> None:
    with TritonServer(local_settings(MODEL_REPOSITORY)) as server:
        server.wait_ready(GUARD_S)
        num_answers = asyncio.run(_speak_all(server.grpc_url))
        assert server.is_ready()
    assert min(num_answers) >= 3


async def _speak_all(url: str) -> list[int]:
    """The number of answers of each caller. Raises the error that any of them got."""
    channels = [wire.InferChannel(url) for _ in range(4)]
    for channel in channels:
        await channel.connect(GUARD_S)
    stop_s = time.monotonic() + _SECONDS
    callers = (
        _speak(channels[number % len(channels)], number, stop_s) for number in range(_NUM_CALLERS)
    )
    num_answers = await asyncio.gather(*callers)
    for channel in channels:
        await channel.close()
    return num_answers


async def _speak(channel: wire.InferChannel, number: int, stop_s: float) -> int:
    """Short streams one after the other through one call; they bring no audio to decode."""
    call, nothing, num_answers = channel.open_stream(), np.empty(0, np.int16), 0
    chunk = wire.body(nothing, "pcm16")
    while time.monotonic() < stop_s:
        head = wire.head("oasr_streaming", 1 + number + _NUM_CALLERS * num_answers)
        for flags in (wire.START, b"", wire.END):
            assert await call.ask(head + flags + chunk, GUARD_S) == ""
            num_answers += 1
        await asyncio.sleep(_PAUSE_S)
    return num_answers
