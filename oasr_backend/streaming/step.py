"""One step: what goes to the device, and in which parts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from oasr_backend.decoders.base import Finish
from oasr_backend.models.acoustic_model import ModelOutput
from oasr_backend.streaming.batching import StepBatch, slots_of, split_step, stack_windows
from oasr_backend.streaming.fair_lock import FairLock
from oasr_backend.streaming.faults import Faults
from oasr_backend.streaming.parts import EngineParts
from oasr_backend.streaming.runner import EncoderRunner
from oasr_backend.streaming.store import StreamStore
from oasr_backend.streaming.streams import NO_SLOT, Stream

#: Windows that an END in whole chunks leaves behind the one that it fills: with tail padding, two.
_LAST_WINDOWS = 2
_NO_CONTEXT: AbstractContextManager[None] = nullcontext()


@dataclass
class _Launched:
    """Streams whose step the device works on; `finish` is None where that failed."""

    streams: Sequence[Stream]
    begin_s: float
    finish: Finish | None = None


class Stepper:
    """Prepare, forward, commit, land. On a GPU one part's host work runs beside another's.

    Takes place under the engine's lock, which is free while the model runs: there the steps of
    other lanes go on. A fault marks the streams that took part and no others; their requests are
    the engine's.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        lane: int,
        lock: FairLock,
        faults: Faults,
        conclude: Callable[[Sequence[Stream]], None],
    ) -> None:
        """`conclude` is told which streams a part has advanced, while the next one runs."""
        self.runner = parts.runner
        self._lane, self._faults = lane, faults
        self._store, self._geometry = parts.store, parts.geometry
        self._metrics = parts.metrics
        self._lock = lock
        self.conclude = conclude
        self._slow_step_s = parts.config.step.debug_slow_step_ms / 1000
        self._landed_s = 0.0
        self._begin_s: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the step in progress began; 0 between two steps."""
        begin_s = self._begin_s
        return 0.0 if begin_s is None else time.monotonic() - begin_s

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """The time of a step, which `age_s` tells."""
        self._begin_s = time.monotonic()
        try:
            yield
        finally:
            self._begin_s = None

    def run(self, streams: Sequence[Stream]) -> None:
        """One window of each stream, and all that is left of those that end."""
        ahead: deque[_Launched] = deque()
        try:
            for part in self._parts(streams):
                ahead.append(self._launch(part))
                # Before the next part is made up: streams may fail as they land.
                if len(ahead) == EncoderRunner.MOST_AHEAD:
                    self._land(ahead.popleft())
        finally:
            self._land_all(ahead)

    def without_full(self, streams: Sequence[Stream]) -> Sequence[Stream]:
        """Unlimited history has a ceiling; a stream that reaches it ends with its text so far."""
        if self._store.has_bounded_history or not streams:
            return streams
        is_full_B = self._store.at_capacity(slots_of(streams))
        full = [one for one, is_full in zip(streams, is_full_B, strict=True) if is_full]
        for stream in full:
            stream.finish_reason = "length"
            stream.audio.discard()
        self.conclude(full)
        return [stream for stream in streams if stream.has_ready_window]

    def _parts(self, streams: Sequence[Stream]) -> Iterator[Sequence[Stream]]:
        """What is launched one after the other; asking for the next means the last is launched.

        A stream that ends goes on to its last window: nothing else of it is to come. It is in the
        first part, so that its next window shares the second part with those that have not stepped.
        """
        if not self.runner.runs_ahead:
            yield streams
            return
        part, left = split_step(streams)
        yield part
        for _ in range(1 + _LAST_WINDOWS):
            ending = [one for one in part if one.audio.is_finished and one.has_ready_window]
            part, left = [*left, *self.without_full(ending)], []
            if not part:
                return
            yield part

    def _launch(self, streams: Sequence[Stream]) -> _Launched:
        launched = _Launched(streams, begin_s=time.perf_counter())
        for stream in streams:
            stream.num_in_flight += 1
        with self._faults.failing(streams):
            batch = self._prepare(streams)
            with self._lock.released():
                output = self._forward(batch)
            launched.finish = self._store.commit(batch.rows, output)
            num_frames = batch.rows.num_frames_B.tolist()
            for stream, count in zip(streams, num_frames, strict=True):
                stream.num_encoder_frames += count
        return launched

    def _prepare(self, streams: Sequence[Stream]) -> StepBatch:
        slots_B = slots_of(streams)
        self._store.prepare(slots_B)
        return stack_windows(
            streams, slots_B, self._geometry, into=self.runner.next_staging(self._lane)
        )

    def _forward(self, batch: StepBatch) -> ModelOutput:
        if self._slow_step_s:
            time.sleep(self._slow_step_s)
        return self.runner.forward(batch)

    def _land_all(self, ahead: deque[_Launched]) -> None:
        """Also those behind one that lands badly: until then the device may write to their rows."""
        try:
            while ahead:
                self._land(ahead.popleft())
        finally:
            if ahead:
                self._land_all(ahead)

    def _land(self, launched: _Launched) -> None:
        if launched.finish is not None:
            with self._faults.failing(launched.streams):
                launched.finish()
        landed_s = time.perf_counter()
        step_ms = (landed_s - launched.begin_s) * 1e3
        for stream in launched.streams:
            stream.step_ms = step_ms
            stream.num_in_flight -= 1
        # Of two parts that overlap, the time counts once.
        self._metrics.step_done(
            len(launched.streams), landed_s - max(launched.begin_s, self._landed_s)
        )
        self._landed_s = landed_s
        self.conclude([stream for stream in launched.streams if not stream.num_in_flight])


def weigh_ends(
    store: StreamStore,
    streams: Iterable[Stream],
    *,
    while_weighing: AbstractContextManager[None] = _NO_CONTEXT,
) -> None:
    """The last order of those that ended; the attention decoder runs in `while_weighing`."""
    if not store.decoders.weighs_ends:
        return
    ended = [one for one in streams if one.audio.is_finished and not one.has_ready_window]
    slots = [one.slot for one in ended if one.failure is None and one.slot != NO_SLOT]
    if weighing := store.decoders.end(slots):
        try:
            with while_weighing:
                weighing.weigh()
        finally:
            weighing.settle()
