"""Several requests of one id in one list, and the queue that puts them in order."""

from __future__ import annotations

import pytest

from oasr_backend.streaming.requests import Pending, RequestQueues
from tests.engine_helpers import (
    ask,
    ask_one,
    assert_all_is_free,
    chunk,
    error_of,
    golden_engine,
    noise,
    text_alone,
)


def test_two_starts_in_one_list_leave_the_second_stream() -> None:
    engine = golden_engine(max_streams=1)
    first, second = ask(engine, chunk(1, noise(1), flags="S"), chunk(1, noise(2), flags="S"))
    assert first.error is None
    assert second.error is None
    assert ask_one(engine, 1, flags="E").text == text_alone(noise(2))
    assert_all_is_free(engine)


def test_of_two_ends_in_one_list_the_first_finishes_the_stream() -> None:
    engine = golden_engine()
    ask(engine, chunk(1, noise(1), flags="S"), chunk(2, noise(2), flags="S"))
    first, other, second = ask(
        engine, chunk(1, flags="E"), chunk(2, flags="E"), chunk(1, flags="E")
    )
    assert first.text == text_alone(noise(1))
    assert other.text == text_alone(noise(2))
    assert second.error is not None
    assert second.error.triton_code == "INVALID_ARG"
    error_of(second, "send START")
    assert_all_is_free(engine)


@pytest.mark.parametrize("is_start_first", [True, False])
def test_an_end_and_the_next_start_share_a_list_in_either_order(is_start_first: bool) -> None:
    engine = golden_engine(max_streams=1)
    ask_one(engine, 1, noise(1)[:10000], flags="S")
    end = chunk(1, noise(1)[10000:], flags="E")
    start = chunk(1, noise(2)[:20000], flags="S")
    if is_start_first:
        started, ended = ask(engine, start, end)
    else:
        ended, started = ask(engine, end, start)
    assert ended.text == text_alone(noise(1))
    assert started.error is None
    final = ask_one(engine, 1, noise(2)[20000:], flags="E")
    assert final.text == text_alone(noise(2))
    assert engine.parts.metrics.conflicts == 0
    assert_all_is_free(engine)


def test_a_whole_pipelined_utterance_is_heard_in_its_order() -> None:
    engine, samples = golden_engine(), noise(3)
    results = ask(
        engine,
        chunk(1, samples[:5000], flags="S"),
        chunk(1, samples[5000:20000]),
        chunk(1, samples[20000:], flags="E"),
        chunk(1, noise(4), flags="SE"),
    )
    assert [result.error for result in results] == [None] * 4
    assert results[2].text == text_alone(samples)
    assert results[3].text == text_alone(noise(4))
    assert_all_is_free(engine)


def test_a_start_that_arrives_after_its_end_is_a_new_stream() -> None:
    engine = golden_engine()
    error_of(ask_one(engine, 1, noise(1), flags="E"), "send START")
    assert ask_one(engine, 1, noise(1), flags="S").error is None
    assert ask_one(engine, 1, flags="E").text == text_alone(noise(1))
    assert_all_is_free(engine)


def test_who_waits_behind_a_long_chunk_comes_after_it() -> None:
    engine = golden_engine()
    long = noise(1, seconds=8)
    (head,) = engine.submit([chunk(1, long, flags="S")])
    engine.step()
    (waiting,) = engine.submit([chunk(1, noise(2), flags="E")])
    other, _ = ask(engine, chunk(2, noise(3), flags="SE"), chunk(3, flags="SE"))
    assert other.text == text_alone(noise(3))
    while not waiting.is_done:
        engine.step()
    assert head.is_done
    assert waiting.result is not None
    assert waiting.result.error is None
    assert_all_is_free(engine)


def test_the_queue_of_an_id_is_served_one_by_one() -> None:
    queues = RequestQueues()
    first, second, other = (Pending(chunk(name)) for name in ("a", "a", "b"))
    assert queues.push(first)
    assert not queues.push(second)
    assert queues.push(other)
    assert queues.heads() == [first, other]
    assert queues.all() == [first, other, second]
    assert len(queues) == 3
    assert queues.pop(["a"]) == [second]
    assert queues.heads() == [second, other]
    assert queues.pop(["b", "a"]) == []
    assert len(queues) == 0


def test_streams_that_were_stepped_go_to_the_back() -> None:
    queues, engine = RequestQueues(), golden_engine()
    requests = {name: Pending(chunk(name)) for name in "abc"}
    for pending in requests.values():
        queues.push(pending)
    ask(engine, chunk("a", flags="S"), chunk("b", flags="S"))
    queues.stepped([engine.streams.get("a", now_s=0.0)])
    assert queues.heads() == [requests["b"], requests["c"], requests["a"]]
    queues.clear()
    assert len(queues) == 0
    queues.stepped([engine.streams.get("b", now_s=0.0)])
