"""The session's next request after each kind of answer, without a server."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from oasr_client.errors import (
    ClientError,
    DeadlineError,
    OverloadedError,
    RequestRejectedError,
    ServerUnavailableError,
    StreamEndedError,
    StreamLostError,
    StreamStateError,
)
from oasr_client.naming import MAX_SEQUENCE_ID, random_id
from oasr_client.session import (
    Pause,
    RetryPolicy,
    Session,
    StreamUpdate,
    advance,
    join_texts,
)
from oasr_client.wire import ChunkRequest, Reply


def session(sequence_id: Any = 7, *, policy: RetryPolicy | None = None, **options: Any) -> Session:
    return Session(
        sequence_id, dtype="pcm16", options=options, policy=policy or RetryPolicy(backoff_s=0.0)
    )


class Server:
    """Plays the server's part of an exchange: counts samples, and fails as scripted."""

    def __init__(self, *script: ClientError | None) -> None:
        self.script = list(script)
        self.requests: list[ChunkRequest] = []
        self.pauses_s: list[float] = []
        self.num_samples = 0

    def run(self, stream: Session, num_samples: int, *, is_last: bool = False) -> StreamUpdate:
        exchange = stream.exchange(np.zeros(num_samples), is_last=is_last)
        step = advance(exchange)
        while not isinstance(step, StreamUpdate):
            step = advance(exchange, self.perform(step))
        return step

    def perform(self, step: ChunkRequest | Pause) -> Reply | ClientError | None:
        if isinstance(step, Pause):
            self.pauses_s.append(step.seconds)
            return None
        self.requests.append(step)
        failure = self.script.pop(0) if self.script else None
        if failure is not None:
            return failure
        self.num_samples = step.samples.size + (0 if step.is_start else self.num_samples)
        return Reply(f"n{self.num_samples}")


def test_start_comes_once_with_the_options_and_end_closes() -> None:
    stream, server = session(nbest=2), Server()
    assert server.run(stream, 10).text == "n10"
    server.run(stream, 5)
    final = server.run(stream, 1, is_last=True)
    assert (final.text, final.is_final) == ("n16", True)
    flags = [(r.is_start, r.is_end, dict(r.options)) for r in server.requests]
    assert flags == [(True, False, {"nbest": 2}), (False, False, {}), (False, True, {})]
    with pytest.raises(StreamStateError, match="finished"):
        server.run(stream, 1)
    assert stream.abandon_request() is None


def test_one_request_may_be_start_and_end() -> None:
    stream, server = session(), Server()
    server.run(stream, 0, is_last=True)
    assert [(r.is_start, r.is_end, r.samples.size) for r in server.requests] == [(True, True, 0)]


def test_a_stream_that_is_left_is_ended_if_the_server_may_hold_it() -> None:
    unsent, left = session(), session()
    Server().run(left, 5)
    assert unsent.abandon_request() is None
    end = left.abandon_request()
    assert end is not None
    assert (end.is_end, end.is_start, end.samples.size) == (True, False, 0)
    assert left.abandon_request() is None
    with pytest.raises(StreamStateError, match="left before its end"):
        Server().run(left, 1)


def test_a_cancelled_start_is_ended_too() -> None:
    stream = session()
    exchange = stream.exchange(np.zeros(5), is_last=False)
    advance(exchange)
    exchange.close()
    assert stream.abandon_request() is not None


def test_a_second_chunk_in_flight_is_refused() -> None:
    stream = session()
    first = stream.exchange(np.zeros(5), is_last=False)
    advance(first)
    with pytest.raises(StreamStateError, match="in flight"):
        advance(stream.exchange(np.zeros(5), is_last=False))
    assert isinstance(advance(first, Reply("x")), StreamUpdate)


@pytest.mark.parametrize("loss", [StreamLostError("idle"), ServerUnavailableError("gone")])
def test_a_short_stream_that_is_lost_is_sent_again_whole(loss: ClientError) -> None:
    stream, server = session(nbest=2), Server(None, None, loss)
    server.run(stream, 10)
    server.run(stream, 20)
    update = server.run(stream, 3, is_last=True)
    assert (update.text, update.segment, update.is_final) == ("n33", 0, True)
    again = server.requests[-1]
    assert (again.is_start, again.is_end, again.samples.size) == (True, True, 33)
    assert dict(again.options) == {"nbest": 2}


def test_a_long_stream_that_is_lost_goes_on_as_a_new_segment() -> None:
    policy = RetryPolicy(replay_limit_s=15 / 16000)
    stream, server = session(policy=policy), Server(None, None, StreamLostError("idle"))
    server.run(stream, 10)
    server.run(stream, 20)
    update = server.run(stream, 3)
    assert (update.text, update.segment) == ("n30 n3", 1)
    assert server.run(stream, 4).text == "n30 n7"


def test_a_replay_longer_than_one_piece_ends_only_with_its_last_piece() -> None:
    policy = RetryPolicy(replay_limit_s=math.inf)
    stream, server = session(policy=policy), Server(None, StreamLostError("idle"))
    server.run(stream, 25 * 16000)
    update = server.run(stream, 5, is_last=True)
    sizes = [(r.samples.size, r.is_start, r.is_end) for r in server.requests[2:]]
    assert sizes == [(160000, True, False), (160000, False, False), (80005, False, True)]
    assert (update.text, update.is_final) == ("n400005", True)


def test_a_loss_during_the_replay_starts_the_replay_again() -> None:
    lost = StreamLostError("idle")
    stream, server = session(), Server(None, lost, None, lost)
    server.run(stream, 20 * 16000)
    assert server.run(stream, 5, is_last=True).text == "n320005"


def test_restarts_are_counted_and_then_the_loss_is_told() -> None:
    lost = StreamLostError("idle")
    policy = RetryPolicy(max_restarts=2)
    stream, server = session(policy=policy), Server(None, lost, None, lost, None, lost)
    server.run(stream, 20 * 16000)
    with pytest.raises(StreamLostError):
        server.run(stream, 10)
    with pytest.raises(StreamStateError, match="StreamLostError"):
        server.run(stream, 10)


def test_a_chunk_that_gets_through_renews_the_restarts() -> None:
    stream = session(policy=RetryPolicy(max_restarts=1))
    server = Server(None, *[StreamLostError("idle"), None] * 5)
    texts = [server.run(stream, 10).text for _ in range(6)]
    assert texts == ["n10", "n20", "n30", "n40", "n50", "n60"]


def test_a_stream_at_its_longest_length_goes_on_as_a_new_segment() -> None:
    stream, server = session(), Server(None, StreamEndedError("length"))
    server.run(stream, 10)
    update = server.run(stream, 5)
    assert (update.text, update.segment) == ("n10 n5", 1)


def test_start_is_tried_again_with_growing_pauses() -> None:
    policy = RetryPolicy(start_attempts=4, backoff_s=0.5, max_backoff_s=1.0)
    full = OverloadedError("full")
    stream, server = session(policy=policy), Server(full, ServerUnavailableError("gone"), full)
    assert server.run(stream, 10).text == "n10"
    assert server.pauses_s == [0.5, 1.0, 1.0]
    assert all(request.is_start for request in server.requests)


def test_by_default_an_overloaded_server_is_told_at_once() -> None:
    stream = session()
    with pytest.raises(OverloadedError):
        Server(OverloadedError("full")).run(stream, 10)


@pytest.mark.parametrize("refusal", [OverloadedError("full"), RequestRejectedError("bad option")])
def test_a_refused_start_is_ended_because_triton_still_holds_it(refusal: ClientError) -> None:
    stream = session()
    with pytest.raises(type(refusal)):
        Server(refusal).run(stream, 10)
    assert stream.abandon_request() is not None


def test_a_late_answer_gives_the_stream_up_but_still_ends_it() -> None:
    stream, server = session(), Server(None, DeadlineError("late"))
    server.run(stream, 10)
    with pytest.raises(DeadlineError):
        server.run(stream, 10)
    assert stream.abandon_request() is not None


def test_a_rejected_chunk_leaves_the_stream_as_it_was() -> None:
    stream, server = session(), Server(None, RequestRejectedError("bad"))
    server.run(stream, 10)
    with pytest.raises(RequestRejectedError):
        server.run(stream, 10)
    assert server.run(stream, 5, is_last=True).text == "n15"


@pytest.mark.parametrize("sequence_id", [0, -1, 2**63, "", True])
def test_ids_that_triton_cannot_carry_are_refused(sequence_id: Any) -> None:
    with pytest.raises(StreamStateError, match="cannot name a stream"):
        session(sequence_id)


def test_random_ids_are_in_range_and_differ() -> None:
    ids = [random_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(0 < value <= MAX_SEQUENCE_ID for value in ids)


def test_an_option_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(RequestRejectedError, match="hotwords is list"):
        session(hotwords=["a"])


def test_texts_are_joined_by_one_space() -> None:
    assert join_texts("A B", "C") == "A B C"
    assert join_texts("", "C") == "C"
    assert join_texts("A", "") == "A"
