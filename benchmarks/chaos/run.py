"""The long run: many clients, a third of them behaving, and the checks afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.chaos.acts import ACTS, DEEDS, Stage
from benchmarks.chaos.behaving import Manners, Outcome, behave
from benchmarks.chaos.caller import DEADLINE_S, Caller, Record
from benchmarks.chaos.calm import fill, quiet_pass, rehearse, speak_a_minute
from benchmarks.chaos.health import (
    Memory,
    Streams,
    num_opened,
    stall_now_and_then,
    wait_until_empty,
    wait_until_published,
    watch,
)
from benchmarks.chaos.report import (
    ChaosReport,
    Check,
    deed_check,
    hang_checks,
    leak_checks,
    memory_checks,
    missing_deeds,
    rest_checks,
    text_checks,
)
from benchmarks.chaos.server import Limits, limited_server
from benchmarks.chaos.speech import read_clips
from benchmarks.load import wire
from benchmarks.load.prometheus import Metrics
from oasr_backend.serve.group import running_in_group
from oasr_backend.serve.process import TritonServer

#: glibc keeps up to twice the largest block that was ever freed, so a minute of audio lets resident
#: memory go up and down by 8 MiB. With fixed thresholds a leak shows.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_MMAP_THRESHOLD_": "1048576"}
#: Triton keeps the memory of so many calls, each at the size of the largest request it has carried.
#: The many of `oasr-serve` are for streaming calls, of which there are none here; with them, each
#: minute of audio takes 2 MiB until all calls have had one, and a leak would not show.
_TRITONS_OWN_POOL = "--grpc-infer-allocation-pool-size=8"
#: Each number of streams in a step costs memory once, so all are reached before memory is watched.
#: Those of the shipped 64 would take a small machine half as long as a short run.
_STEP_STREAMS = 32
_SAMPLES_PER_RUN = 300
_SHORTEST_INTERVAL_S = 0.5
#: The behaving clients ask for this share of the audio that one quiet stream gets served.
_BEHAVING_SHARE = 0.5
_SPEED_RANGE = (0.25, 4.0)
_SHOWN_METRICS = (
    "oasr_streams_opened_total", "oasr_streams_reaped_total", "oasr_conflicts_total",
    "oasr_rejected_total", "oasr_finished_total", "oasr_audio_seconds_total",
    "oasr_compute_seconds_total",
)  # fmt: skip


@dataclass(frozen=True)
class ChaosSettings:
    """A third of `num_clients` behaves. A request that takes longer than `deadline_s` hangs.

    A run takes `seconds`, and longer where a slow machine has not had every act in them.
    """

    seconds: float = 60.0
    num_clients: int = 64
    deadline_s: float = DEADLINE_S
    pause_s: tuple[float, float] = (0.1, 1.0)
    seed: int = 1
    limits: Limits = field(
        default_factory=lambda: Limits(
            max_streams=256,
            # A minute of speech in one request may hold up the others for so long on a small
            # machine, and Triton counts that as their silence.
            triton_idle_s=15.0,
            stream_idle_s=18.0,
            overrides={"debug_slow_step_ms": "20", "max_step_streams": str(_STEP_STREAMS)},
            flags=(_TRITONS_OWN_POOL,),
            environment={**_MALLOC, "CHAOS_REACH_WIDTHS": str(_STEP_STREAMS)},
        )
    )

    @property
    def num_behaving(self) -> int:
        return self.num_clients // 3


def run_chaos(settings: ChaosSettings) -> ChaosReport:
    """Starts a server, lets the clients loose, and checks what is left."""
    with limited_server(settings.limits) as server:
        return _Run(settings, server).run()


class _Run:
    def __init__(self, settings: ChaosSettings, server: TritonServer) -> None:
        self._settings = settings
        self._server = server
        self._clips = read_clips()
        self._behaving = Outcome()
        self._record = Record()
        self._memory: list[Memory] = []
        self._stop_s = 0.0

    def run(self) -> ChaosReport:
        limits = self._settings.limits
        # The published figures may be older than the end of the last stream.
        wait_until_published(self._server)
        before = Streams.read(self._server)
        quiet, capacity = quiet_pass(self._server, self._clips)
        rehearsed = self._rehearse()
        rest_before, opened_before = Memory.at_rest(self._server), num_opened(self._server)
        processes = set(running_in_group(self._server.pid))
        begin_s = time.monotonic()
        unfinished = asyncio.run(self._drive(self._speed(capacity)))
        seconds = time.monotonic() - begin_s
        after = wait_until_empty(
            self._server, before.free_blocks, limits.stream_idle_s + self._settings.deadline_s
        )
        rest_after = Memory.at_rest(self._server)
        num_streams = num_opened(self._server) - opened_before
        checks = [
            quiet,
            *rehearsed,
            deed_check(self._record, DEEDS),
            *text_checks(self._behaving, self._record, num_clients=self._settings.num_behaving),
            *hang_checks(self._behaving, self._record, unfinished=unfinished),
            *leak_checks(before, after),
            *memory_checks(self._memory),
            *rest_checks(rest_before, rest_after, num_streams=num_streams),
            asyncio.run(fill(self._server.grpc_url, num_slots=limits.max_streams)),
            self._still_there(processes),
        ]
        return ChaosReport(
            seconds=seconds,
            speed=self._speed(capacity),
            capacity_audio_s_per_s=capacity,
            checks=checks,
            behaving=self._behaving,
            record=self._record,
            memory=[rest_before, *self._memory, rest_after],
            metrics=_shown_metrics(self._server),
        )

    def _rehearse(self) -> list[Check]:
        """Uses all that a run needs at most, so that memory has its size before the watch."""
        url = self._server.grpc_url
        self._minute = asyncio.run(speak_a_minute(url, self._clips))
        texts = asyncio.run(rehearse(url, self._clips, num_streams=self._settings.num_clients))
        room = asyncio.run(fill(url, num_slots=self._settings.limits.max_streams))
        return [texts, replace(room, name="room for all streams at first")]

    def _speed(self, capacity: float) -> float:
        slowest, fastest = _SPEED_RANGE
        speed = _BEHAVING_SHARE * capacity / self._settings.num_behaving
        return min(max(speed, slowest), fastest)

    async def _drive(self, speed: float) -> int:
        """Lets the clients run; returns how many did not end when they should."""
        self._stop_s = time.monotonic() + self._settings.seconds
        interval_s = max(_SHORTEST_INTERVAL_S, self._settings.seconds / _SAMPLES_PER_RUN)
        chance = random.Random(self._settings.seed)
        aside = [
            asyncio.create_task(watch(self._server, into=self._memory, interval_s=interval_s)),
            asyncio.create_task(stall_now_and_then(self._server, chance, self._record.deeds)),
        ]
        clients = [asyncio.create_task(one) for one in (*self._behavers(speed), *self._villains())]
        limits = self._settings.limits
        patience_s = 3 * (self._settings.deadline_s + limits.stream_idle_s)
        done, pending = await asyncio.wait(clients, timeout=self._settings.seconds + patience_s)
        # The watching and stalling tasks end by an error only, and then the run proves nothing.
        ended_early = [task for task in aside if task.done()]
        for task in (*aside, *pending):
            task.cancel()
        await asyncio.gather(*aside, *pending, return_exceptions=True)
        for task in (*done, *ended_early):
            task.result()
        return len(pending)

    def _is_over(self) -> bool:
        if time.monotonic() < self._stop_s:
            return False
        is_patient = time.monotonic() < self._stop_s + self._settings.deadline_s
        return not (is_patient and missing_deeds(self._record, DEEDS))

    def _behavers(self, speed: float) -> list[Coroutine[Any, Any, None]]:
        manners = Manners(
            url=self._server.grpc_url,
            clips=self._clips,
            speed=speed,
            deadline_s=self._settings.deadline_s,
            is_over=self._is_over,
        )
        seeds = range(self._settings.seed, self._settings.seed + self._settings.num_behaving)
        return [behave(manners, self._behaving, seed) for seed in seeds]

    def _villains(self) -> list[Coroutine[Any, Any, None]]:
        stage = Stage(
            server=self._server,
            limits=self._settings.limits,
            clips=self._clips,
            minute=self._minute,
            huge=asyncio.Semaphore(1),
            victims=asyncio.Semaphore(1),
            ends_minute=itertools.cycle((True, False)),
        )
        count = self._settings.num_clients - self._settings.num_behaving
        return [self._villain(stage, index) for index in range(count)]

    async def _villain(self, stage: Stage, index: int) -> None:
        chance = random.Random(f"{self._settings.seed} {index}")
        channel = wire.InferChannel(self._server.grpc_url)
        caller = Caller(channel, self._record, deadline_s=self._settings.deadline_s, chance=chance)
        acts, weights = zip(*ACTS, strict=True)
        while not self._is_over():
            await asyncio.sleep(chance.uniform(*self._settings.pause_s))
            await chance.choices(acts, weights)[0](caller, stage)
        await channel.close()

    def _still_there(self, processes: set[int]) -> Check:
        """Whether server and stub are the same as before, and give an exact text."""
        same = set(running_in_group(self._server.pid)) == processes
        answer, _ = quiet_pass(self._server, self._clips[:2])
        return Check(
            "the server still answers",
            same and answer.passed,
            f"same processes: {same}; {answer.detail}",
        )


def _shown_metrics(server: TritonServer) -> dict[str, float]:
    metrics, shown = Metrics.fetch(server.metrics_url), {}
    for name in _SHOWN_METRICS:
        with contextlib.suppress(KeyError):
            shown[name] = metrics.total(name)
    return shown
