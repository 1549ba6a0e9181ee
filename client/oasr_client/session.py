"""One stream's life without any I/O: the next request, and the meaning of a reply or a loss.

`Session.exchange` is a generator of steps: a `ChunkRequest` to send or a `Pause` to wait. The
driver performs a step and hands its outcome to `advance`, until that returns a `StreamUpdate`.
The drivers, one blocking and one asyncio, are in `streaming.py`.

The server may hear a stream in several parts: one ends at the server's longest length, or is lost.
The next part begins with the first sample that the server has not decoded.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oasr_client.errors import (
    ClientError,
    OverloadedError,
    RequestRejectedError,
    ServerUnavailableError,
    StreamEndedError,
    StreamLostError,
    StreamStateError,
)
from oasr_client.naming import check_options, check_sequence_id, random_id
from oasr_client.part import Part
from oasr_client.parts import Parts
from oasr_client.retry import RetryPolicy as RetryPolicy
from oasr_client.scripts import join_texts as join_texts
from oasr_client.sent import SentAudio
from oasr_client.whole import whole
from oasr_client.wire import ChunkRequest, OptionValue, Reply, SequenceId, to_wire, wire_dtype

SAMPLE_RATE_HZ = 16000
REPLAY_PIECE_S = 10.0


@dataclass(frozen=True)
class StreamUpdate:
    """The answer to everything that the server has heard so far.

    `text` and `result` (the RESULT document, when asked for, with all entries) tell the whole
    stream, also where the server heard it in several parts; `segment` counts the parts before the
    current one.
    `latency_s` is the time from sending the chunk to its answer.
    """

    text: str
    is_final: bool
    result: dict[str, Any] | None
    latency_s: float
    segment: int = 0


@dataclass(frozen=True)
class Pause:
    seconds: float


Exchange = Generator[ChunkRequest | Pause, Reply | ClientError | None, StreamUpdate]


def advance(
    exchange: Exchange, outcome: Reply | ClientError | None = None
) -> ChunkRequest | Pause | StreamUpdate:
    """The next step, or the exchange's result. (StopIteration cannot cross a coroutine.)"""
    try:
        return exchange.send(outcome)
    except StopIteration as done:
        update: StreamUpdate = done.value
        return update


class Session:
    """Not thread-safe: one request of a stream is in flight at a time, as Triton's order needs."""

    def __init__(
        self,
        sequence_id: SequenceId | None,
        *,
        dtype: str,
        options: Mapping[str, OptionValue],
        policy: RetryPolicy,
        want_result: bool = True,
    ) -> None:
        self.sequence_id = random_id() if sequence_id is None else sequence_id
        check_sequence_id(self.sequence_id)
        check_options(options)
        self._dtype = dtype
        self._options = dict(options)
        self._policy = policy
        self._want_result = want_result
        self._audio = SentAudio(wire_dtype(dtype))
        self._parts = Parts()
        self._part = Part.starting(0, SAMPLE_RATE_HZ)
        # The last update covers samples up to here.
        self._num_told = 0
        self._num_starts_failed = 0
        self._num_restarts = 0
        self._is_started = False
        self._may_be_held = False
        self._is_busy = False
        self._closed_because = ""

    def exchange(self, samples: Any, *, is_last: bool) -> Exchange:
        """Raises ClientError; after any but RequestRejectedError the stream is closed."""
        self._check_open()
        chunk = to_wire([] if samples is None else samples, self._dtype)
        first = self._audio.end
        self._audio.append(chunk)
        self._is_busy = True
        try:
            return (yield from self._until_answered(first, is_last=is_last))
        finally:
            self._is_busy = False
            if self._closed_because:
                self._audio.close()

    def abandon_request(self) -> ChunkRequest | None:
        """The END that lets the server free the stream now, or None if it holds none."""
        self._closed_because = self._closed_because or "left before its end"
        self._audio.close()
        if not self._may_be_held:
            return None
        self._may_be_held = False
        return ChunkRequest(self.sequence_id, to_wire([], self._dtype), is_end=True)

    def _check_open(self) -> None:
        if self._closed_because:
            raise StreamStateError(
                f"the stream {self.sequence_id!r} is closed ({self._closed_because}); open another"
            )
        if self._is_busy:
            raise StreamStateError(
                f"a chunk of stream {self.sequence_id!r} is in flight; await its answer first"
            )

    def _until_answered(self, first: int, *, is_last: bool) -> Exchange:
        """Sends the samples that are unsent; those from `first` on are new."""
        while True:
            request = self._request(first, is_last=is_last)
            sent_s = time.perf_counter()
            try:
                outcome = yield request
            except GeneratorExit:
                self._closed_because = "cancelled"
                raise
            if isinstance(outcome, Reply):
                update = self._accept(outcome, request, time.perf_counter() - sent_s)
                if self._part.next == self._audio.end:
                    self._num_restarts = 0
                    self._num_told = self._part.decoded
                    return update
            elif isinstance(outcome, ClientError):
                yield Pause(self._recover(outcome, request, first))

    def _request(self, first: int, *, is_last: bool) -> ChunkRequest:
        begin, end = self._part.next, self._audio.end
        if begin != first:
            # Audio is sent again in pieces that stay well within a deadline.
            end = min(end, begin + round(REPLAY_PIECE_S * SAMPLE_RATE_HZ))
        is_start = not self._is_started
        self._may_be_held = True
        return ChunkRequest(
            self.sequence_id,
            self._audio.read(begin, end),
            is_start,
            is_last and end == self._audio.end,
            self._options if is_start else {},
        )

    def _accept(self, reply: Reply, request: ChunkRequest, latency_s: float) -> StreamUpdate:
        self._is_started = True
        self._num_starts_failed = 0
        self._may_be_held = not request.is_end
        if reply.result:
            reply = replace(reply, result=whole(reply.result, self._part.document))
        self._part.heard(reply, request.samples.size)
        update = self._update(reply, latency_s, is_final=request.is_end)
        if self._part.is_at_length:
            self._go_on_behind(is_end=request.is_end)
        elif self._part.num_sent > self._policy.replay_limit_s * SAMPLE_RATE_HZ:
            self._audio.forget(self._part.decoded)
        if request.is_end and self._part.next == self._audio.end:
            self._closed_because = "finished"
        return update

    def _update(self, reply: Reply, latency_s: float, *, is_final: bool) -> StreamUpdate:
        document = self._parts.document(reply.result) if reply.result else reply.result
        if document and self._part.is_at_length and not is_final and self._policy.max_restarts:
            # The part is over, but the stream goes on.
            document = {**document, "is_final": False, "finish_reason": None}
        return StreamUpdate(
            self._parts.text(reply.text),
            is_final,
            document if self._want_result else None,
            latency_s,
            len(self._parts),
        )

    def _go_on_behind(self, *, is_end: bool) -> None:
        """A new part behind what the server had decoded when it ended this one.

        Raises StreamEndedError where samples would remain unheard.
        """
        part = self._part
        is_told = "decoded_s" in part.document
        if is_end and is_told and part.decoded == self._audio.end:
            return
        if is_told and part.decoded > part.begin and self._policy.max_restarts:
            self._begin_part()
        elif is_end or self._policy.max_restarts:
            self._closed_because = StreamEndedError.__name__
            unheard = (
                self._unheard(part.decoded)
                if is_told
                else "it does not say how much it had decoded"
            )
            raise StreamEndedError(
                f"the server ended the stream at its longest length: {unheard}; send shorter "
                "streams, allow restarts with RetryPolicy, or raise the server's max_blocks_per_seq"
            )

    def _unheard(self, begin: int) -> str:
        from_s, sent_s = (count / self._part.rate_hz for count in (begin, self._audio.end))
        return f"{sent_s - from_s:.2f} s of the audio sent, from {from_s:.2f} s on, were not heard"

    def _begin_part(self) -> None:
        self._parts.close(self._part.text, self._part.document)
        self._part = self._part.following()
        self._audio.forget(self._part.begin)
        self._is_started = False

    def _recover(self, error: ClientError, request: ChunkRequest, first: int) -> float:
        """Seconds to wait before the unsent samples go. Raises `error` when no attempt is left."""
        if request.is_start and self._may_start_again(error):
            self._num_starts_failed += 1
            return self._policy.pause_s(self._num_starts_failed - 1)
        if not request.is_start and self._may_restart(error):
            self._restart(error)
            return 0.0
        self._note_failure(error, first)
        # A part that was begun anew may have told less than the one before it.
        num_heard = max(self._num_told, self._part.decoded)
        is_cut = isinstance(error, StreamEndedError) or num_heard > 0
        if is_cut and not isinstance(error, RequestRejectedError):
            raise type(error)(f"{self._unheard(num_heard)}: {error}") from error
        raise error

    def _may_start_again(self, error: ClientError) -> bool:
        is_passing = isinstance(error, (OverloadedError, ServerUnavailableError))
        return is_passing and self._num_starts_failed + 1 < self._policy.start_attempts

    def _may_restart(self, error: ClientError) -> bool:
        is_loss = isinstance(error, (StreamLostError, ServerUnavailableError))
        is_told = self._options.get("partials", "every") == "every"
        return (
            is_loss
            and self._num_restarts < self._policy.max_restarts
            and (is_told or self._may_replay(error))
        )

    def _may_replay(self, error: ClientError) -> bool:
        is_whole = self._audio.begin <= self._part.begin
        return is_whole and not isinstance(error, StreamEndedError)

    def _restart(self, error: ClientError) -> None:
        self._num_restarts += 1
        if self._may_replay(error):
            self._part = Part.starting(self._part.begin, self._part.rate_hz)
            self._is_started = False
        else:
            self._begin_part()

    def _note_failure(self, error: ClientError, first: int) -> None:
        if isinstance(error, RequestRejectedError):
            # The stream goes on without the chunk.
            self._audio.cut(max(self._part.next, first))
            return
        self._closed_because = type(error).__name__
        # Triton itself keeps a slot even for a START that the model refused, until END or idleness.
        self._may_be_held = not isinstance(error, ServerUnavailableError)
