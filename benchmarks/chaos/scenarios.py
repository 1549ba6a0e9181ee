"""Bounded attacks of one kind each, with the figures that a test judges."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

import grpc  # type: ignore[import-untyped]
import numpy as np

from benchmarks.chaos.caller import (
    DEADLINE_S,
    EMPTY,
    REFUSED,
    SILENCE,
    new_id,
    request,
    status_of,
)
from benchmarks.chaos.health import Streams, wait_until_empty
from benchmarks.chaos.server import Limits, limited_server
from benchmarks.chaos.speech import read_clips
from benchmarks.load import wire
from benchmarks.load.prometheus import HistogramChange, Metrics

_NUM_CONNECTIONS = 4


@dataclass(frozen=True)
class Abandoned:
    """`before` and `after` are the server's streams; nothing is sent between the last START and
    `after`; `at_last` is between the two."""

    num_opened: int
    num_refused: int
    before: Streams
    at_last: Streams
    after: Streams
    seconds_until_empty: float


#: There are far fewer places than STARTs: a caller that finds no place asks again, and gets one as
#: soon as the first abandoned streams are past Triton's limit. Every 25th START brings a whole
#: encoder window, so that blocks are in use.
ABANDON_LIMITS = Limits(max_streams=600, triton_idle_s=1.0, stream_idle_s=2.0)
_WINDOW_EVERY = 25
_NUM_OPENERS = 32
_ASK_AGAIN_S = 0.05


def open_and_abandon(count: int = 10_000, limits: Limits = ABANDON_LIMITS) -> Abandoned:
    """Opens streams, never sends END, and then reads metrics only."""
    with limited_server(limits) as server:
        before = Streams.read(server)
        answers = asyncio.run(_open_many(server.grpc_url, count))
        at_last = Streams.read(server)
        begin_s = time.monotonic()
        after = wait_until_empty(server, before.free_blocks, limits.stream_idle_s + DEADLINE_S)
        return Abandoned(
            num_opened=answers["OK"],
            num_refused=answers.total() - answers["OK"],
            before=before,
            at_last=at_last,
            after=after,
            seconds_until_empty=time.monotonic() - begin_s,
        )


async def _open_many(url: str, count: int) -> Counter[str]:
    """Answers by status. Gives up when no stream gets in any more: fewer than `count` are "OK"."""
    clip, answers, numbers = read_clips()[0], Counter[str](), iter(range(count))
    channels = [wire.InferChannel(url) for _ in range(_NUM_CONNECTIONS)]
    last_opened_s = time.monotonic()

    async def opener(channel: wire.InferChannel) -> None:
        nonlocal last_opened_s
        # The openers share one iterator: each takes the next number.
        for number in numbers:
            samples = clip.samples_S[:16_000] if number % _WINDOW_EVERY == 0 else SILENCE[:160]
            started = request(new_id(), samples, flags=wire.START)
            while (status := await status_of(channel, started)) != "OK":
                answers[status] += 1
                if time.monotonic() - last_opened_s > DEADLINE_S:
                    return
                await asyncio.sleep(_ASK_AGAIN_S)
            answers["OK"] += 1
            last_opened_s = time.monotonic()

    await asyncio.gather(*(opener(channels[i % _NUM_CONNECTIONS]) for i in range(_NUM_OPENERS)))
    for channel in channels:
        await channel.close()
    return answers


@dataclass
class Overload:
    """Latencies in seconds, by phase; odd phases are flooded.

    `admitted_s` are of the same streams all along and count from the intended send times.
    """

    admitted_s: list[array[float]]
    refusal_s: list[array[float]]
    refusals: Counter[str] = field(default_factory=Counter)
    refusal_texts: set[str] = field(default_factory=set)
    admitted_errors: Counter[str] = field(default_factory=Counter)
    mean_step_s: float = 0.0

    @classmethod
    def of(cls, num_phases: int) -> Overload:
        latencies = [[array("d") for _ in range(num_phases)] for _ in range(2)]
        return cls(*latencies)

    def slowdown(self) -> float:
        """90th percentile with the flood over that of the phase before: the median of all pairs.

        A machine that stands still for a moment spoils one pair, a flood that does harm all.
        """
        p90_s = [np.percentile(phase_s, 90) for phase_s in self.admitted_s]
        return float(np.median(np.divide(p90_s[1::2], p90_s[0::2])))

    def refusal_steps(self) -> float:
        """How many mean steps a refusal takes: the median of the flooded phases' medians."""
        medians_s = [np.median(phase_s) for phase_s in self.refusal_s[1::2]]
        return float(np.median(medians_s)) / self.mean_step_s


OVERLOAD_LIMITS = Limits(max_streams=4, triton_idle_s=30.0, stream_idle_s=40.0)
_CHUNK_S = 0.16
#: A refused client asks again after this; 12 of them make 24 STARTs a second.
_RETRY_PAUSE_S = 0.5


def overload(
    *, phase_s: float = 3.0, num_phases: int = 14, limits: Limits = OVERLOAD_LIMITS
) -> Overload:
    """`max_streams` streams in real time, and in every second phase 3x as many clients that knock.

    Quiet and flooded phases alternate, so that both meet the same machine.
    """
    with limited_server(limits) as server:
        attack = _Overloading(limits, phase_s=phase_s, num_phases=num_phases)
        before = Metrics.fetch(server.metrics_url)
        found = asyncio.run(attack.run(server.grpc_url))
        steps = HistogramChange.between(
            before, Metrics.fetch(server.metrics_url), "oasr_step_seconds"
        )
        found.mean_step_s = steps.mean if steps else 0.0
        return found


class _Overloading:
    def __init__(self, limits: Limits, *, phase_s: float, num_phases: int) -> None:
        self._limits = limits
        self._phase_s = phase_s
        self._num_phases = num_phases
        self._clip = read_clips()[0]
        self._result = Overload.of(num_phases)
        self._start_s = 0.0

    async def run(self, url: str) -> Overload:
        self._admitted, self._flood = wire.InferChannel(url), wire.InferChannel(url)
        ids = [new_id() for _ in range(self._limits.max_streams)]
        for stream_id in ids:
            started = request(stream_id, self._clip.samples_S[:16_000], flags=wire.START)
            await self._admitted.call(started, DEADLINE_S)
        self._start_s = time.monotonic()
        knockers = 3 * self._limits.max_streams
        await asyncio.gather(
            *(self._speak(stream_id, index) for index, stream_id in enumerate(ids)),
            *(self._knock(index / knockers) for index in range(knockers)),
        )
        for stream_id in ids:
            await self._admitted.call(request(stream_id, EMPTY, flags=wire.END), DEADLINE_S)
        for channel in (self._admitted, self._flood):
            await channel.close()
        return self._result

    def _phase(self, at_s: float) -> int:
        """Odd phases are flooded. The run is over at `num_phases`."""
        return int((at_s - self._start_s) / self._phase_s)

    async def _speak(self, stream_id: int, index: int) -> None:
        """The phase of the intended time decides where a latency counts."""
        step = round(_CHUNK_S * 16_000)
        chunks = itertools.cycle(
            [self._clip.samples_S[i : i + step] for i in range(0, len(self._clip.samples_S), step)]
        )
        intended_s = self._start_s + _CHUNK_S * index / self._limits.max_streams
        while (phase := self._phase(intended_s)) < self._num_phases:
            await asyncio.sleep(max(0.0, intended_s - time.monotonic()))
            status = await status_of(self._admitted, request(stream_id, next(chunks)))
            self._result.admitted_s[phase].append(time.monotonic() - intended_s)
            if status != "OK":
                self._result.admitted_errors[status] += 1
            intended_s += _CHUNK_S

    async def _knock(self, offset: float) -> None:
        await asyncio.sleep(offset * _RETRY_PAUSE_S)
        while (phase := self._phase(time.monotonic())) < self._num_phases:
            if phase % 2:
                await self._ask(phase)
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _ask(self, phase: int) -> None:
        started = request(new_id(), self._clip.samples_S[:5120], flags=wire.START)
        sent_s = time.monotonic()
        try:
            await self._flood.call(started, DEADLINE_S)
            self._result.refusals["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self._result.refusal_s[phase].append(time.monotonic() - sent_s)
            self._result.refusals[error.code().name] += 1
            if error.code().name == REFUSED:
                self._result.refusal_texts.add(error.details())
