"""Callers at a full server: abandoned streams make room for them, and live streams do not."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc  # type: ignore[import-untyped]

from benchmarks.chaos.caller import DEADLINE_S, EMPTY, OK, new_id, request
from benchmarks.chaos.calm import speak_a_minute
from benchmarks.chaos.health import Streams, wait_until_empty
from benchmarks.chaos.server import Limits, limited_server
from benchmarks.chaos.speech import Clip, read_clips
from benchmarks.load import wire
from benchmarks.load.prometheus import Metrics
from benchmarks.load.utterances import Pcm
from oasr_backend.serve.process import TritonServer

_ASK_AGAIN_S = 0.1
_OPENING_S = 0.5
_NUM_KNOCKERS = 8
_COUNTERS = ("opened", "reaped")


@dataclass
class FullHouse:
    """`texts` pairs what those inside got with what they should; the rest is of those outside.

    `counters` is what the server counted, `before` and `after` its streams.
    """

    before: Streams
    texts: list[tuple[str, str]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    refusal_texts: set[str] = field(default_factory=set)
    first_admission_s: float = 0.0
    longest_request_s: float = 0.0
    seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    after: Streams | None = None

    @property
    def wrong_texts(self) -> list[str]:
        return [f"{text!r} instead of {right!r}" for text, right in self.texts if text != right]


#: The backend's own limit is out of reach: a new stream gets in by eviction only.
DEAD_LIMITS = Limits(max_streams=24, triton_idle_s=10.0, stream_idle_s=3600.0)


def full_of_the_dead(limits: Limits = DEAD_LIMITS) -> FullHouse:
    """Abandoned streams take every place; as many callers ask until they get in.

    `first_admission_s` counts from the STARTs of the abandoned.
    """
    return _visit(limits, _bury_and_inherit)


#: Every step is slow: a minute of audio is some 90 of them, which outlast Triton's limit.
LIVING_LIMITS = Limits(
    max_streams=16, triton_idle_s=8.0, stream_idle_s=3600.0, overrides={"debug_slow_step_ms": "130"}
)
#: Both count idle limits: how long others ask, and how long before their end the minute is sent.
_KNOCKING = 3.0
_HOLDING = 1.25


def full_of_the_living(limits: Limits = LIVING_LIMITS) -> FullHouse:
    """Live streams that pause take every place, while other callers ask for one.

    One of them has a minute of audio in hand for longer than Triton's idle limit.
    """
    return _visit(limits, _live_and_knock)


def _visit(limits: Limits, act: Callable[[TritonServer, Limits, FullHouse], None]) -> FullHouse:
    with limited_server(limits) as server:
        house = FullHouse(before=Streams.read(server))
        act(server, limits, house)
        house.after = wait_until_empty(server, house.before.free_blocks, DEADLINE_S)
        metrics = Metrics.fetch(server.metrics_url)
        house.counters = {
            name: int(metrics.total(f"oasr_streams_{name}_total")) for name in _COUNTERS
        }
        return house


def _bury_and_inherit(server: TritonServer, limits: Limits, house: FullHouse) -> None:
    async def act() -> None:
        channel, clips = wire.InferChannel(server.grpc_url), read_clips()
        window_S = clips[0].samples_S[:16_000]
        dead = [request(new_id(), window_S, flags=wire.START) for _ in range(limits.max_streams)]
        begin_s = time.monotonic()
        await asyncio.gather(*(channel.call(start, DEADLINE_S) for start in dead))

        async def inherit(clip: Clip) -> None:
            text = await _speak(channel, clip.chunks(640), house, give_up_s=limits.stream_idle_s)
            house.texts.append((text, clip.text))

        async def note_first() -> None:
            while not house.answers[OK]:
                await asyncio.sleep(0.01)
            house.first_admission_s = time.monotonic() - begin_s

        heirs = (inherit(clips[index % len(clips)]) for index in range(limits.max_streams))
        await asyncio.gather(note_first(), *heirs)
        house.seconds = time.monotonic() - begin_s
        await channel.close()

    asyncio.run(act())


def _live_and_knock(server: TritonServer, limits: Limits, house: FullHouse) -> None:
    clips = read_clips()

    async def act() -> None:
        minute = await speak_a_minute(server.grpc_url, clips)
        channel = wire.InferChannel(server.grpc_url)
        begin_s = time.monotonic()
        end_s = begin_s + _KNOCKING * limits.triton_idle_s
        inside = [
            asyncio.create_task(_live(channel, clips[index % len(clips)], house, limits, end_s))
            for index in range(limits.max_streams - 1)
        ]
        inside.append(asyncio.create_task(_hold(channel, minute, house, limits, end_s)))
        while Streams.read(server).active < limits.max_streams:
            await asyncio.sleep(_OPENING_S)
        knockers = [asyncio.create_task(_knock(channel, house)) for _ in range(_NUM_KNOCKERS)]
        # A stream that leaves makes room, so all stop knocking before the first one does.
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        house.seconds = time.monotonic() - begin_s
        for task in knockers:
            task.cancel()
        await asyncio.gather(*knockers, return_exceptions=True)
        await asyncio.gather(*inside)
        await channel.close()

    asyncio.run(act())


async def _live(
    channel: wire.InferChannel, clip: Clip, house: FullHouse, limits: Limits, end_s: float
) -> None:
    """An utterance with pauses of up to half of Triton's limit, which lasts until `end_s`."""
    stream_id, chance = new_id(), random.Random(clip.name)
    await channel.call(request(stream_id, EMPTY, flags=wire.START), DEADLINE_S)
    chunks = iter(clip.chunks(800))
    while time.monotonic() < end_s:
        await asyncio.sleep(chance.uniform(0.1, 0.5) * limits.triton_idle_s)
        await channel.call(request(stream_id, next(chunks, EMPTY)), DEADLINE_S)
    for chunk in chunks:
        await channel.call(request(stream_id, chunk), DEADLINE_S)
    end = await channel.call(request(stream_id, EMPTY, flags=wire.END), DEADLINE_S)
    house.texts.append((wire.text_of(end), clip.text))


async def _hold(
    channel: wire.InferChannel, minute: Clip, house: FullHouse, limits: Limits, end_s: float
) -> None:
    """Its last request is served until after `end_s`, which is longer than Triton's limit."""
    stream_id = new_id()
    await channel.call(request(stream_id, EMPTY, flags=wire.START), DEADLINE_S)
    while time.monotonic() < end_s - _HOLDING * limits.triton_idle_s:
        await channel.call(request(stream_id, EMPTY), DEADLINE_S)
        await asyncio.sleep(0.1 * limits.triton_idle_s)
    begin_s = time.monotonic()
    last = request(stream_id, minute.samples_S, flags=wire.END)
    text = await channel.ask(last, DEADLINE_S)
    house.longest_request_s = time.monotonic() - begin_s
    house.texts.append((text, minute.text))


async def _knock(channel: wire.InferChannel, house: FullHouse) -> None:
    while True:
        await _start(channel, request(new_id(), EMPTY, flags=wire.START), house)
        await asyncio.sleep(_ASK_AGAIN_S)


async def _speak(
    channel: wire.InferChannel, chunks: Sequence[Pcm], house: FullHouse, *, give_up_s: float
) -> str:
    """Speaks an utterance as soon as the server admits its START."""
    stream_id, give_up_s = new_id(), time.monotonic() + give_up_s
    while not await _start(channel, request(stream_id, chunks[0], flags=wire.START), house):
        if time.monotonic() > give_up_s:
            return "never let in"
        await asyncio.sleep(_ASK_AGAIN_S)
    for chunk in chunks[1:]:
        await channel.call(request(stream_id, chunk), DEADLINE_S)
    end = await channel.call(request(stream_id, EMPTY, flags=wire.END), DEADLINE_S)
    return wire.text_of(end)


async def _start(channel: wire.InferChannel, started: bytes, house: FullHouse) -> bool:
    """Whether the server admitted it."""
    try:
        await channel.call(started, DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        house.answers[error.code().name] += 1
        house.refusal_texts.add(error.details() or "")
        return False
    house.answers[OK] += 1
    return True
