"""Sends ten thousand bad requests of every kind beside one good stream, and checks the rest."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.chaos.acts import WRONG_TENSORS
from benchmarks.chaos.caller import (
    DEADLINE_S,
    EMPTY,
    SILENCE,
    bad_request,
    new_id,
    request,
    status_of,
)
from benchmarks.chaos.health import Memory, Streams, wait_until_empty
from benchmarks.chaos.server import Limits, limited_server
from benchmarks.chaos.speech import Clip, read_clips
from benchmarks.load import wire
from oasr_backend.serve.process import TritonServer


@dataclass(frozen=True)
class BadRequests:
    answers: Counter[str]
    text: str
    expected_text: str
    rest_before: Memory
    rest_after: Memory
    before: Streams
    after: Streams


BAD_LIMITS = Limits(max_streams=64, triton_idle_s=20.0, stream_idle_s=25.0)
_NUM_BAD_CLIENTS = 16
_WARM_UP = 500


def bad_requests(count: int = 10_000, limits: Limits = BAD_LIMITS) -> BadRequests:
    """Bad requests of every kind while one good stream speaks from before them until after.

    `rest_before` and `rest_after` are taken while no request is served.
    """
    with limited_server(limits) as server:
        before = Streams.read(server)
        clip = max(read_clips(), key=lambda one: one.samples_S.size)
        # Memory reaches its size before the first reading.
        asyncio.run(_BesideBad(server, clip).run(_WARM_UP))
        rest_before = Memory.at_rest(server)
        beside = _BesideBad(server, clip)
        text = asyncio.run(beside.run(count))
        return BadRequests(
            answers=beside.answers,
            text=text,
            expected_text=clip.text,
            rest_before=rest_before,
            rest_after=Memory.at_rest(server),
            before=before,
            after=wait_until_empty(server, before.free_blocks, DEADLINE_S),
        )


class _BesideBad:
    def __init__(self, server: TritonServer, clip: Clip) -> None:
        self._url = server.grpc_url
        self._clip = clip
        self._num_sent = 0
        self.answers = Counter[str]()

    async def run(self, count: int) -> str:
        """The good stream's text."""
        channel = wire.InferChannel(self._url)
        requests = itertools.islice(itertools.cycle(_bad_kinds()), count)
        good = asyncio.create_task(self._speak(channel, count))
        await asyncio.gather(*(self._misbehave(requests) for _ in range(_NUM_BAD_CLIENTS)))
        text = await good
        await channel.close()
        return text

    async def _misbehave(self, requests: itertools.islice[bytes]) -> None:
        channel = wire.InferChannel(self._url)
        for bad in requests:
            self._num_sent += 1
            self.answers[await status_of(channel, bad)] += 1
        await channel.close()

    async def _speak(self, channel: wire.InferChannel, count: int) -> str:
        """Chunk k goes when k parts of the bad requests are out, so the two span the same time."""
        stream_id, chunks = new_id(), self._clip.chunks(320)
        for index, chunk in enumerate(chunks):
            while self._num_sent < count * index // len(chunks):
                await asyncio.sleep(0.01)
            flags = wire.START if index == 0 else b""
            await channel.call(request(stream_id, chunk, flags=flags), DEADLINE_S)
        answer = await channel.call(request(stream_id, EMPTY, flags=wire.END), DEADLINE_S)
        return wire.text_of(answer)


def _bad_kinds() -> Sequence[bytes]:
    """One request of each kind; the ids are new, so that none of them continues another."""
    spoiled = np.full(1600, np.nan, dtype=np.float32)
    nan = bad_request(new_id(), spoiled.tobytes(), name="WAV", triton_type="FP32", shape=(1, 1600))
    wrong_tensors = [
        bad_request(new_id(), data, name=name, triton_type=triton_type, shape=shape) + wire.START
        for data, name, triton_type, shape in WRONG_TENSORS
    ]
    return [
        nan + wire.START,
        request(new_id(), SILENCE),
        request(new_id(), SILENCE, flags=wire.START, parameters={"sample_rate": 1}),
        request(new_id(), SILENCE, flags=wire.START, parameters={"no_such_option": 1}),
        *wrong_tensors,
    ]
