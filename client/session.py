"""One stream's life without any I/O: what to send next, what a reply means, what a loss means.

`Session.exchange` is a generator of steps: a `ChunkRequest` to send or a `Pause` to wait. The
driver performs a step and hands its outcome to `advance`, until that returns a `StreamUpdate`.
The drivers, one blocking and one asyncio, are in `streaming.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from oasr_client.errors import (
    ClientError,
    OverloadedError,
    RequestRejectedError,
    ServerUnavailableError,
    StreamEndedError,
    StreamLostError,
    StreamStateError,
)
from oasr_client.scripts import join_texts
from oasr_client.whole import whole
from oasr_client.wire import ChunkRequest, OptionValue, Reply, Samples, SequenceId, to_wire

SAMPLE_RATE_HZ = 16000
MAX_SEQUENCE_ID = 2**63 - 1
REPLAY_PIECE_S = 10.0


@dataclass(frozen=True)
class StreamUpdate:
    """What the server has heard so far.

    `text` is the whole stream's text, earlier segments included; `result` (the RESULT document,
    when asked for, with all entries) is about the current `segment`, which counts the restarts
    whose text was kept.
    `latency_s` is the time from sending the chunk to its answer.
    """

    text: str
    is_final: bool
    result: dict[str, Any] | None
    latency_s: float
    segment: int = 0


@dataclass(frozen=True)
class RetryPolicy:
    """How hard to try. The default repairs a lost stream and otherwise fails at once.

    `start_attempts`: how often START is sent while the server is overloaded or unreachable.
    `max_restarts`: how often one chunk may have the stream started again because the server
    lost it.
    `replay_limit_s`: a lost stream that has sent no more audio than this is sent again as a
    whole, and its text is replaced; a longer one goes on as a new segment whose text is appended
    to the text so far (what the server held back undecoded, under one window, is then lost).
    A stream that the server ended at its longest length always goes on as a new segment.
    `backoff_s` doubles with each attempt up to `max_backoff_s`.
    """

    start_attempts: int = 1
    max_restarts: int = 3
    replay_limit_s: float = 30.0
    backoff_s: float = 0.25
    max_backoff_s: float = 4.0

    def pause_s(self, attempt: int) -> float:
        return float(min(self.backoff_s * 2**attempt, self.max_backoff_s))


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


@dataclass
class KeptAudio:
    """What the current segment has sent, as long as that is at most `limit_samples`."""

    limit_samples: float
    chunks: list[Samples] = field(default_factory=list)
    num_samples: int = 0

    @property
    def is_whole(self) -> bool:
        return self.num_samples <= self.limit_samples

    def append(self, chunk: Samples) -> None:
        self.num_samples += chunk.size
        self.chunks.append(chunk)
        if not self.is_whole:
            self.chunks.clear()


class Session:
    """Not thread-safe: one request of a stream is in flight at a time, as Triton's order needs."""

    def __init__(
        self,
        sequence_id: SequenceId | None,
        *,
        dtype: str,
        options: Mapping[str, OptionValue],
        policy: RetryPolicy,
    ) -> None:
        self.sequence_id = random_id() if sequence_id is None else sequence_id
        check_sequence_id(self.sequence_id)
        check_options(options)
        self._dtype = dtype
        self._options = dict(options)
        self._policy = policy
        self._kept = self._new_kept()
        self._earlier_text = ""
        self._text = ""
        self._result: dict[str, Any] = {}
        self._segment = 0
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
        self._is_busy = True
        try:
            return (yield from self._until_answered(chunk, is_last=is_last))
        finally:
            self._is_busy = False

    def abandon_request(self) -> ChunkRequest | None:
        """The END that lets the server free the stream now, or None if it holds none."""
        self._closed_because = self._closed_because or "left before its end"
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

    def _until_answered(self, chunk: Samples, *, is_last: bool) -> Exchange:
        unsent = [chunk]
        while True:
            request = self._request(unsent[0], is_last=is_last and len(unsent) == 1)
            sent_s = time.perf_counter()
            try:
                outcome = yield request
            except GeneratorExit:
                self._closed_because = "cancelled"
                raise
            if isinstance(outcome, Reply):
                update = self._accept(outcome, request, time.perf_counter() - sent_s)
                unsent.pop(0)
                if not unsent:
                    self._num_restarts = 0
                    return update
            elif isinstance(outcome, ClientError):
                pause_s, unsent = self._recover(outcome, request, unsent)
                yield Pause(pause_s)

    def _request(self, chunk: Samples, *, is_last: bool) -> ChunkRequest:
        is_start = not self._is_started
        self._may_be_held = True
        options = self._options if is_start else {}
        return ChunkRequest(self.sequence_id, chunk, is_start, is_last, options)

    def _accept(self, reply: Reply, request: ChunkRequest, latency_s: float) -> StreamUpdate:
        self._is_started = True
        self._num_starts_failed = 0
        self._text = reply.text
        self._kept.append(request.samples)
        if request.is_end:
            self._closed_because = "finished"
            self._may_be_held = False
        text = join_texts(self._earlier_text, reply.text)
        result = reply.result
        if result is not None:
            result = whole(result, {} if request.is_start else self._result)
            self._result = result
        return StreamUpdate(text, request.is_end, result, latency_s, self._segment)

    def _recover(
        self, error: ClientError, request: ChunkRequest, unsent: list[Samples]
    ) -> tuple[float, list[Samples]]:
        """Seconds to wait and what to send then; raises `error` when it must be told."""
        if request.is_start and self._may_start_again(error):
            self._num_starts_failed += 1
            return self._policy.pause_s(self._num_starts_failed - 1), unsent
        if not request.is_start and self._may_restart(error):
            may_replay = not isinstance(error, StreamEndedError)
            return 0.0, self._restart_with(unsent, may_replay=may_replay)
        self._note_failure(error)
        raise error

    def _may_start_again(self, error: ClientError) -> bool:
        is_passing = isinstance(error, (OverloadedError, ServerUnavailableError))
        return is_passing and self._num_starts_failed + 1 < self._policy.start_attempts

    def _may_restart(self, error: ClientError) -> bool:
        is_loss = isinstance(error, (StreamLostError, ServerUnavailableError))
        return is_loss and self._num_restarts < self._policy.max_restarts

    def _restart_with(self, unsent: list[Samples], *, may_replay: bool) -> list[Samples]:
        self._num_restarts += 1
        self._is_started = False
        if may_replay and self._kept.is_whole:
            unsent = in_pieces([*self._kept.chunks, *unsent])
        else:
            self._earlier_text = join_texts(self._earlier_text, self._text)
            self._segment += 1
        self._kept = self._new_kept()
        return unsent

    def _note_failure(self, error: ClientError) -> None:
        if isinstance(error, RequestRejectedError):
            return
        self._closed_because = type(error).__name__
        # Triton itself keeps a slot even for a START that the model refused, until END or idleness.
        self._may_be_held = not isinstance(error, ServerUnavailableError)

    def _new_kept(self) -> KeptAudio:
        return KeptAudio(self._policy.replay_limit_s * SAMPLE_RATE_HZ)


def check_sequence_id(sequence_id: SequenceId) -> None:
    if isinstance(sequence_id, str):
        is_good = bool(sequence_id)
    else:
        is_good = not isinstance(sequence_id, bool) and 0 < sequence_id <= MAX_SEQUENCE_ID
    if not is_good:
        raise StreamStateError(
            f"sequence_id {sequence_id!r} cannot name a stream; "
            f"use 1..{MAX_SEQUENCE_ID} or a non-empty string"
        )


def check_options(options: Mapping[str, OptionValue]) -> None:
    for name, value in options.items():
        if not isinstance(value, (bool, int, float, str)):
            raise RequestRejectedError(
                f"option {name} is {type(value).__name__}; use a bool, int, float or string"
            )


def in_pieces(chunks: list[Samples]) -> list[Samples]:
    """The same samples in requests that stay well within a deadline; at least one piece."""
    joined = np.concatenate(chunks)
    step = round(REPLAY_PIECE_S * SAMPLE_RATE_HZ)
    return [joined[start : start + step] for start in range(0, max(joined.size, 1), step)]


def random_id() -> int:
    """A positive 63-bit id: gRPC carries Triton's ids as signed 64-bit integers."""
    return secrets.randbelow(MAX_SEQUENCE_ID) + 1
