"""The order of things: requests in, one batched step for all that are ready, answers out.

State changes at four moments only: open, prepare, commit, close. A failure between prepare and
commit closes the streams of that step and touches no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from oasr_backend.device import on_device
from oasr_backend.errors import StepFailedError
from oasr_backend.metrics import Reading
from oasr_backend.streaming.batching import next_batch
from oasr_backend.streaming.desk import RequestDesk
from oasr_backend.streaming.fair_lock import FairLock
from oasr_backend.streaming.faults import Faults
from oasr_backend.streaming.lanes import Lanes, News
from oasr_backend.streaming.parts import EngineParts
from oasr_backend.streaming.requests import Pending
from oasr_backend.streaming.step import Stepper
from oasr_backend.streaming.streams import Stream
from oasr_backend.types import AudioChunk, ChunkResult

#: A thread whose requests are in others' steps looks again after so long, whatever it is told.
_LOOK_INTERVAL_S = 1.0


class Stepped(NamedTuple):
    """How many streams a step found waiting, and how many are ready when it has ended."""

    num_found: int
    num_left: int


class Engine:
    """Serves many streams with one model. Thread-safe: every public call takes the lock.

    `submit` admits requests, `step` advances every stream that has a full window by one, and a
    request is done once its stream has none left. While the model or the attention decoder runs
    the lock is free, so that no caller waits for a step to be told no, and as many steps go on as
    there are lanes, each for other streams. What a step works on stays as it is: a stream's next
    request waits behind the one that is served.
    """

    def __init__(self, parts: EngineParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.parts = parts
        self.config, self.store, self.streams = parts.config, parts.store, parts.streams
        self._clock = clock
        # Taken in this order: a lane by who steps, all of them by who wants no step to go on.
        self._lanes, self._lock = Lanes(self.config.step.steps_at_once), FairLock()
        self._news = News()
        self.faults = Faults()
        self._desk = RequestDesk(parts, self.faults, clock=clock)
        self.steppers = [
            Stepper(parts, lane=lane, lock=self._lock, faults=self.faults, conclude=self._conclude)
            for lane in range(self._lanes.count)
        ]

    @property
    def is_healthy(self) -> bool:
        """False once the device cannot be used any more; every request then says so."""
        return self.faults.lost is None

    @property
    def step_age_s(self) -> float:
        """Seconds since the oldest step in progress began; 0 while none goes on."""
        return max(stepper.age_s for stepper in self.steppers)

    def process(self, requests: Sequence[AudioChunk]) -> list[ChunkResult]:
        """All of it, for callers that can wait: one answer per request, in their order."""
        batch = self.submit(requests)
        while not all(pending.is_done for pending in batch):
            seen = self._news.count
            if not self.step().num_found:
                self._news.wait_past(seen, timeout_s=_LOOK_INTERVAL_S)
        return [pending.result for pending in batch if pending.result is not None]

    def submit(self, requests: Sequence[AudioChunk]) -> list[Pending]:
        """Admits requests; one that needs no decoding is done at once."""
        with self._lock:
            return self._desk.take_in(requests)

    def step(self, *, shares: int = 1) -> Stepped:
        """One window of every stream that is ready, as far as the step's width goes.

        `shares`: into how many steps that begin together the streams are to be divided. Raises
        nothing: what goes wrong is the answer of those who took part and have none yet.
        """
        with self._lanes.one() as lane, self._lock, self.steppers[lane].clocked():
            waiting = self._waiting()
            ready = list[Stream]()
            with self._desk.failing_whole(waiting):
                width = self.config.step.max_step_streams
                ready = next_batch(waiting, max_step_streams=width, shares=shares)
            with _held(ready), self._desk.failing_whole(ready), on_device(self.store.device):
                if going_on := self.steppers[lane].without_full(ready):
                    self._desk.queues.stepped(going_on)
                    self.steppers[lane].run(going_on)
            num_left = sum(stream.has_ready_window for stream in self._waiting())
        if waiting:
            self._news.tell()
        return Stepped(len(waiting), num_left)

    def close_idle(self) -> int:
        """Frees streams whose callers went silent; one with a request in hand is not silent."""
        with self._lock:
            return self.parts.admission.reap_idle(now_s=self._clock())

    def close(self) -> None:
        """Answers what is still waiting with an error and frees every stream."""
        with self._lanes.all(), self._lock:
            self._desk.refuse_all(
                StepFailedError("the server unloads this model; send START again")
            )
            for stream in self.streams:
                self.parts.admission.abort(stream, reason="unload")

    def readings(self) -> list[Reading]:
        """Every metric now."""
        with self._lock:
            return [*_gauges(self), *self.parts.metrics.readings()]

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """While no step is going on and no call changes anything."""
        with self._lanes.all(), self._lock:
            yield

    def check_integrity(self) -> None:
        """Every part of the store agrees with itself."""
        with self.at_rest():
            self.store.check_integrity()

    def _waiting(self) -> list[Stream]:
        """Streams whose requests are being served and are in no step, the longest-waiting first."""
        return [stream for stream in self._desk.queues.streams() if not stream.is_stepping]

    def _conclude(self, landed: Sequence[Stream]) -> None:
        self._desk.conclude(landed, while_weighing=self._lock.released())


@contextmanager
def _held(streams: Sequence[Stream]) -> Iterator[None]:
    """No other step takes these streams."""
    for stream in streams:
        stream.is_stepping = True
    try:
        yield
    finally:
        for stream in streams:
            stream.is_stepping = False


def _gauges(engine: Engine) -> Iterator[Reading]:
    pool = engine.store.kv.pool if engine.store.kv is not None else None
    free, total = (pool.num_free_blocks, pool.num_blocks) if pool is not None else (0, 0)
    for name, text, value in (
        ("oasr_active_streams", "Open streams", len(engine.streams)),
        ("oasr_max_streams", "Streams that can be open at once", engine.config.step.max_streams),
        ("oasr_free_blocks", "K/V blocks that no stream holds", free),
        ("oasr_used_blocks", "K/V blocks in use", total - free),
        ("oasr_healthy", "1 while the device works", int(engine.is_healthy)),
    ):
        yield Reading(name, "gauge", text, {}, value)
