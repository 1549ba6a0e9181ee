"""The order of things: requests in, one batched step for all that are ready, answers out.

State changes at four moments only: open, prepare, commit, close. A failure between prepare and
commit closes the streams of that step and touches no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from oasr_backend.device import on_device
from oasr_backend.errors import OasrError, StepFailedError
from oasr_backend.metrics import Reading
from oasr_backend.streaming.batching import next_batch
from oasr_backend.streaming.fair_lock import FairLock
from oasr_backend.streaming.parts import EngineParts
from oasr_backend.streaming.refusal_log import RefusalLog
from oasr_backend.streaming.requests import Pending, RequestQueues
from oasr_backend.streaming.step import Stepper
from oasr_backend.streaming.streams import Stream
from oasr_backend.types import AudioChunk, ChunkResult

logger = logging.getLogger(__name__)


class Engine:
    """Serves many streams with one model. Thread-safe: every public call takes the lock.

    `submit` admits requests, `step` advances every stream that has a full window by one, and a
    request is done once its stream has none left. While the model or the attention decoder runs
    the lock is free, so that no caller waits for a step to be told no. What the step works on stays
    as it is: a stream's next request waits behind the one that is served.
    """

    def __init__(self, parts: EngineParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.parts = parts
        self.config, self.store, self.streams = parts.config, parts.store, parts.streams
        self._clock = clock
        # Taken in this order: first by a caller that steps or wants no step to go on.
        self._stepping, self._lock = FairLock(), FairLock()
        self._queues = RequestQueues()
        self._refusals = RefusalLog(clock)
        self.stepper = Stepper(parts, lock=self._lock, conclude=self._conclude)

    @property
    def is_healthy(self) -> bool:
        """False once the device cannot be used any more; every request then says so."""
        return self.stepper.lost is None

    @property
    def step_age_s(self) -> float:
        """Seconds since the step in progress began; 0 between two steps."""
        return self.stepper.age_s

    def process(self, requests: Sequence[AudioChunk]) -> list[ChunkResult]:
        """All of it, for callers that can wait: one answer per request, in their order."""
        batch = self.submit(requests)
        while not all(pending.is_done for pending in batch):
            self.step()
        return [pending.result for pending in batch if pending.result is not None]

    def submit(self, requests: Sequence[AudioChunk]) -> list[Pending]:
        """Admits requests; one that needs no decoding is done at once.

        Triton keeps one request of a sequence in flight. So a START that shares a list with a
        continuation or END of a live stream of that id begins the *next* stream: it comes later.
        """
        with self._lock:
            batch = [Pending(request) for request in requests]
            in_order = batch
            if any(request.is_first for request in requests):
                in_order = sorted(batch, key=self._begins_anew)
            heads = [pending for pending in in_order if self._queues.push(pending)]
            now_s = self._clock()
            for pending in heads:
                self._admit(pending, now_s)
            with self._failing_whole([one.stream for one in heads if one.stream]):
                self._settle(heads)
            return batch

    def step(self) -> None:
        """One window of every stream that is ready, as far as the step's width goes.

        Raises nothing: what goes wrong is the answer of those who took part and have none yet.
        """
        with self._stepping, self._lock, self.stepper.clocked():
            waiting, ready = self._queues.streams(), list[Stream]()
            with self._failing_whole(waiting):
                ready = next_batch(waiting, max_step_streams=self.config.step.max_step_streams)
            with self._failing_whole(ready), on_device(self.store.device):
                if going_on := self.stepper.without_full(ready):
                    self._queues.stepped(going_on)
                    self.stepper.run(going_on)

    def close_idle(self) -> int:
        """Frees streams whose callers went silent; one with a request in hand is not silent."""
        with self._lock:
            return self.parts.admission.reap_idle(now_s=self._clock())

    def close(self) -> None:
        """Answers what is still waiting with an error and frees every stream."""
        with self._stepping, self._lock:
            unloaded = StepFailedError("the server unloads this model; send START again")
            for pending in self._queues.all():
                self._refuse(pending, unloaded)
            self._queues.clear()
            for stream in self.streams:
                self.parts.admission.abort(stream, reason="unload")

    def readings(self) -> list[Reading]:
        """Every metric now."""
        with self._lock:
            return [*_gauges(self), *self.parts.metrics.readings()]

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """While no step is going on and no call changes anything."""
        with self._stepping, self._lock:
            yield

    def check_integrity(self) -> None:
        """Every part of the store agrees with itself."""
        with self.at_rest():
            self.store.check_integrity()

    def _begins_anew(self, pending: Pending) -> bool:
        return pending.request.is_first and pending.request.stream_id in self.streams

    def _admit(self, pending: Pending, now_s: float) -> None:
        """Opens or finds the stream and gives it the samples; a refusal changes no other stream."""
        request = pending.request
        try:
            if self.stepper.lost is not None:
                raise self.stepper.lost
            pending.stream = self.parts.admission.admit(request, now_s=now_s)
        except OasrError as error:
            self._refuse(pending, error)
        except Exception as error:
            logger.error("event=admission_failed stream=%r", request.stream_id, exc_info=error)
            self._refuse(pending, StepFailedError(f"stream {request.stream_id!r}: {error!r}"))

    def _refuse(self, pending: Pending, error: OasrError) -> None:
        self.parts.metrics.rejected[type(error).__name__] += 1
        self._refusals.note(pending.request.stream_id, error)
        pending.result = ChunkResult(error=error.without_history())

    def _conclude(self, landed: Sequence[Stream]) -> None:
        """Answers those that need no further step, while the device is at the others'."""
        with self.stepper.failing(landed):
            self.stepper.weigh_ends(landed, while_weighing=self._lock.released())
        self._settle([self._queues.head(stream.stream_id) for stream in landed])

    def _settle(self, heads: Sequence[Pending]) -> None:
        """Answers those that have no window left, then admits the requests behind them."""
        now_s = self._clock()
        while done := [head for head in heads if not head.needs_step]:
            self._answer([head for head in done if head.result is None], now_s)
            heads = self._queues.pop([head.request.stream_id for head in done])
            for following in heads:
                self._admit(following, now_s)

    def _answer(self, heads: Sequence[Pending], now_s: float) -> None:
        heard: list[tuple[Pending, Stream]] = []
        for head in heads:
            stream = head.stream
            assert stream is not None
            stream.is_served, stream.last_heard_s = False, now_s
            if stream.failure is not None:
                self._close_failed(head, stream)
                continue
            if head.request.is_last:
                stream.finish_reason = stream.finish_reason or "end"
            heard.append((head, stream))
        try:
            self._tell(heard)
        except Exception as error:
            self._fail_requests([head for head, _ in heard], error)

    def _tell(self, heard: Sequence[tuple[Pending, Stream]]) -> None:
        """The text so far, or the final one; a stream that has that is finished."""
        # No step has concluded an END that came without a window.
        self.stepper.weigh_ends(stream for _, stream in heard)
        texts = self.parts.results.texts([stream for _, stream in heard])
        for (head, stream), text in zip(heard, texts, strict=True):
            wants_result = head.request.wants_result
            document = self.parts.results.document(text, stream) if wants_result else None
            head.result = ChunkResult(text=text, document=document)
            if stream.finish_reason:
                with _freeing(stream):
                    self.parts.admission.finish(stream, forget=head.request.is_last)

    @contextmanager
    def _failing_whole(self, streams: Sequence[Stream]) -> Iterator[None]:
        """What goes wrong inside is at once the answer of those streams that wait for theirs."""
        try:
            yield
        except Exception as error:
            concerned = set(streams)
            heads = [head for head in self._queues.heads() if head.stream in concerned]
            self._fail_requests(heads, error)
            following = self._queues.pop([head.request.stream_id for head in heads])
            for pending in following:
                self._admit(pending, self._clock())
            self._settle(following)

    def _fail_requests(self, heads: Sequence[Pending], error: Exception) -> None:
        """Refuses those that have no answer yet."""
        left = [(head, head.stream) for head in heads if head.stream and not head.is_done]
        self.stepper.fail([stream for _, stream in left], error)
        for head, stream in left:
            self._close_failed(head, stream)

    def _close_failed(self, head: Pending, stream: Stream) -> None:
        assert stream.failure is not None
        self._refuse(head, stream.failure)
        with _freeing(stream):
            self.parts.admission.abort(stream, reason="failed")


@contextmanager
def _freeing(stream: Stream) -> Iterator[None]:
    """What goes wrong inside costs the rows of this stream: it has its answer, others go on."""
    try:
        yield
    except Exception as error:
        logger.error("event=free_failed stream=%r", stream.stream_id, exc_info=error)


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
