"""Requests in, answers out: who is admitted, who has his answer, and whom a fault of a step costs.

Everything here takes place under the engine's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from oasr_backend.errors import OasrError, StepFailedError
from oasr_backend.streaming.faults import Faults
from oasr_backend.streaming.parts import EngineParts
from oasr_backend.streaming.refusal_log import RefusalLog
from oasr_backend.streaming.requests import Pending, RequestQueues
from oasr_backend.streaming.step import weigh_ends
from oasr_backend.streaming.streams import Stream
from oasr_backend.types import AudioChunk, ChunkResult

logger = logging.getLogger(__name__)


class RequestDesk:
    """Keeps the queues. A request is answered once, by the engine's steps or by a refusal."""

    def __init__(self, parts: EngineParts, faults: Faults, *, clock: Callable[[], float]) -> None:
        self.queues = RequestQueues()
        self._parts, self._faults, self._clock = parts, faults, clock
        self._refusals = RefusalLog(clock)

    def take_in(self, requests: Sequence[AudioChunk]) -> list[Pending]:
        """Admits the requests that are their streams' next, and lines up the others.

        Triton keeps one request of a sequence in flight. So a START that shares a list with a
        continuation or END of a live stream of that id begins the *next* stream: it comes later.
        """
        batch = [Pending(request) for request in requests]
        in_order = batch
        if any(request.is_first for request in requests):
            in_order = sorted(batch, key=self._begins_anew)
        heads = [pending for pending in in_order if self.queues.push(pending)]
        now_s = self._clock()
        for pending in heads:
            self._admit(pending, now_s)
        with self.failing_whole([one.stream for one in heads if one.stream]):
            self._settle(heads)
        return batch

    def conclude(
        self, landed: Sequence[Stream], *, while_weighing: AbstractContextManager[None]
    ) -> None:
        """Answers those that need no further step, while the device is at the others'."""
        with self._faults.failing(landed):
            weigh_ends(self._parts.store, landed, while_weighing=while_weighing)
        self._settle([self.queues.head(stream.stream_id) for stream in landed])

    def refuse_all(self, error: OasrError) -> None:
        """Answers whatever waits."""
        for pending in self.queues.all():
            self._refuse(pending, error)
        self.queues.clear()

    @contextmanager
    def failing_whole(self, streams: Sequence[Stream]) -> Iterator[None]:
        """What goes wrong inside is at once the answer of those streams that wait for theirs."""
        try:
            yield
        except Exception as error:
            concerned = set(streams)
            heads = [head for head in self.queues.heads() if head.stream in concerned]
            self._fail_requests(heads, error)
            following = self.queues.pop([head.request.stream_id for head in heads])
            for pending in following:
                self._admit(pending, self._clock())
            self._settle(following)

    def _begins_anew(self, pending: Pending) -> bool:
        return pending.request.is_first and pending.request.stream_id in self._parts.streams

    def _admit(self, pending: Pending, now_s: float) -> None:
        """Opens or finds the stream and gives it the samples; a refusal changes no other stream."""
        request = pending.request
        try:
            if self._faults.lost is not None:
                raise self._faults.lost
            pending.stream = self._parts.admission.admit(request, now_s=now_s)
        except OasrError as error:
            self._refuse(pending, error)
        except Exception as error:
            logger.error("event=admission_failed stream=%r", request.stream_id, exc_info=error)
            self._refuse(pending, StepFailedError(f"stream {request.stream_id!r}: {error!r}"))

    def _refuse(self, pending: Pending, error: OasrError) -> None:
        self._parts.metrics.rejected[type(error).__name__] += 1
        self._refusals.note(pending.request.stream_id, error)
        pending.result = ChunkResult(error=error.without_history())

    def _settle(self, heads: Sequence[Pending]) -> None:
        """Answers those that have no window left, then admits the requests behind them."""
        now_s = self._clock()
        while done := [head for head in heads if not head.needs_step]:
            self._answer([head for head in done if head.result is None], now_s)
            heads = self.queues.pop([head.request.stream_id for head in done])
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
        weigh_ends(self._parts.store, (stream for _, stream in heard))
        texts = self._parts.results.texts([stream for _, stream in heard])
        for (head, stream), text in zip(heard, texts, strict=True):
            wants_result = head.request.wants_result
            document = self._parts.results.document(text, stream) if wants_result else None
            head.result = ChunkResult(text=text, document=document)
            if stream.finish_reason:
                with _freeing(stream):
                    self._parts.admission.finish(stream, forget=head.request.is_last)

    def _fail_requests(self, heads: Sequence[Pending], error: Exception) -> None:
        """Refuses those that have no answer yet."""
        left = [(head, head.stream) for head in heads if head.stream and not head.is_done]
        self._faults.fail([stream for _, stream in left], error)
        for head, stream in left:
            self._close_failed(head, stream)

    def _close_failed(self, head: Pending, stream: Stream) -> None:
        assert stream.failure is not None
        self._refuse(head, stream.failure)
        with _freeing(stream):
            self._parts.admission.abort(stream, reason="failed")


@contextmanager
def _freeing(stream: Stream) -> Iterator[None]:
    """What goes wrong inside costs the rows of this stream: it has its answer, others go on."""
    try:
        yield
    except Exception as error:
        logger.error("event=free_failed stream=%r", stream.stream_id, exc_info=error)
