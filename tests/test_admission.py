"""Who gets in: limits, refusals, duplicates, cancellation, numbered chunks, reaping, audio."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from oasr_backend.errors import InvalidRequestError
from oasr_backend.options import ParameterValue, StreamOptions
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.requests import Pending
from oasr_backend.types import ChunkResult
from tests.engine_helpers import (
    WINDOW_SAMPLES,
    ManualClock,
    ask,
    ask_one,
    assert_all_is_free,
    chunk,
    error_of,
    fault_at,
    golden_engine,
    noise,
    text_alone,
)
from tests.guards import GUARD_S


def served(engine: Engine, pending: Pending) -> ChunkResult:
    while not pending.is_done:
        engine.step()
    assert pending.result is not None
    return pending.result


def test_a_stream_beyond_the_limit_is_refused_with_the_numbers() -> None:
    engine = golden_engine(max_streams=3)
    ask(engine, *(chunk(i, noise(i), flags="S") for i in range(3)))
    (pending,) = engine.submit([chunk("late", noise(9), flags="S")])
    assert pending.result is not None, "the answer is there before any step"
    assert pending.result.error is not None
    assert pending.result.error.triton_code == "UNAVAILABLE"
    error_of(pending.result, "3", "max_streams")
    finals = ask(engine, *(chunk(i, flags="E") for i in range(3)))
    assert [result.text for result in finals] == [text_alone(noise(i)) for i in range(3)]
    assert_all_is_free(engine)


def test_a_language_of_any_length_is_refused_in_few_words() -> None:
    parameters = {"language": "en" * 500_000}
    result = ask_one(golden_engine(), "a", noise(1), flags="S", parameters=parameters)
    error_of(result, "language='enen", "leave language out")
    assert len(str(result.error)) < 500


def test_a_dead_stream_makes_room_for_a_new_one() -> None:
    clock = ManualClock()
    engine = golden_engine(clock, max_streams=2, dead_after_s=60, stream_idle_timeout_s=90)
    ask_one(engine, "dead", noise(1), flags="S")
    clock.now_s += 59
    ask_one(engine, "alive", noise(2), flags="S")
    error_of(ask_one(engine, "new", noise(3), flags="S"), "max_streams")
    clock.now_s += 2
    assert ask_one(engine, "new", noise(3), flags="SE").text == text_alone(noise(3))
    error_of(ask_one(engine, "dead"), "send START")
    assert ask_one(engine, "alive", flags="E").text == text_alone(noise(2))
    assert engine.parts.metrics.streams_reaped == 1


def test_silent_streams_are_reaped_without_any_traffic() -> None:
    clock = ManualClock()
    engine = golden_engine(clock, stream_idle_timeout_s=90)
    ask(engine, chunk("a", noise(1), flags="S"), chunk("b", noise(2), flags="S"))
    clock.now_s += 60
    ask_one(engine, "b", noise(2))
    clock.now_s += 31
    assert engine.close_idle() == 1
    error_of(ask_one(engine, "a"), "'a'", "90 s", "send START")
    clock.now_s += 91
    assert engine.close_idle() == 1
    assert_all_is_free(engine)


def test_a_stream_with_a_request_in_hand_is_never_reaped() -> None:
    clock = ManualClock()
    engine = golden_engine(clock, stream_idle_timeout_s=90, max_step_streams=1)
    samples = noise(1, seconds=4)
    (pending,) = engine.submit([chunk("a", samples, flags="SE")])
    while not pending.is_done:
        clock.now_s += 200
        assert engine.close_idle() == 0
        engine.step()
    assert pending.result is not None
    assert pending.result.text == text_alone(samples)


def test_a_stream_with_a_request_in_hand_makes_no_room_for_another() -> None:
    clock = ManualClock()
    engine = golden_engine(clock, max_streams=1, dead_after_s=60, stream_idle_timeout_s=90)
    samples = noise(1, seconds=4)
    (pending,) = engine.submit([chunk("a", samples, flags="SE")])
    engine.step()
    assert not pending.is_done
    clock.now_s += 61
    error_of(ask_one(engine, "b", noise(2), flags="S"), "max_streams")
    assert served(engine, pending).text == text_alone(samples)


def test_a_second_start_begins_anew_and_counts_as_a_conflict() -> None:
    engine = golden_engine(max_streams=1)
    ask_one(engine, 5, noise(1), flags="S")
    ask_one(engine, 5, noise(1))
    ask_one(engine, 5, noise(2), flags="S")
    assert ask_one(engine, 5, flags="E").text == text_alone(noise(2))
    assert engine.parts.metrics.conflicts == 1
    assert +engine.parts.metrics.finished == {"replaced": 1, "end": 1}
    assert_all_is_free(engine)


def test_a_refused_second_start_ends_the_first_stream() -> None:
    engine = golden_engine()
    ask_one(engine, 5, noise(1), flags="S")
    bad = ask_one(engine, 5, np.full(4, np.nan, np.float32), flags="S")
    error_of(bad, "nan")
    error_of(ask_one(engine, 5, flags="E"), "send START")
    assert_all_is_free(engine)


@pytest.mark.parametrize("flags", ["S", "", "E", "SE"])
def test_a_cancelled_request_frees_its_stream_before_any_work(flags: str) -> None:
    engine = golden_engine()
    if "S" not in flags:
        ask_one(engine, "a", noise(1), flags="S")
    ask_one(engine, "b", noise(2), flags="S")
    num_steps = engine.parts.metrics.step_width.readings()
    before = [sample.value for sample in num_steps]
    result = ask_one(engine, "a", noise(1), flags=flags, is_cancelled=lambda: True)
    assert result.error is not None
    assert result.error.triton_code == "CANCELLED"
    assert [sample.value for sample in engine.parts.metrics.step_width.readings()] == before
    assert engine.parts.metrics.finished["cancelled"] == 1
    assert ask_one(engine, "b", flags="E").text == text_alone(noise(2))
    assert_all_is_free(engine)


def test_a_request_that_asks_for_no_work_is_not_asked_whether_it_is_cancelled() -> None:
    engine = golden_engine()
    ask_one(engine, "a", flags="S")
    asked = itertools.count()

    def is_cancelled() -> bool:
        next(asked)
        return False

    for piece_S in np.split(noise(1)[:WINDOW_SAMPLES], 16):
        ask_one(engine, "a", piece_S, is_cancelled=is_cancelled)
    assert next(asked) == 1, "only the last piece completes a window"


@pytest.mark.parametrize("flags", ["S", ""])
def test_a_request_cancelled_after_its_first_step_is_served_and_its_stream_goes_on(
    flags: str,
) -> None:
    engine, (first, second) = golden_engine(), np.split(noise(1, seconds=4), 2)
    is_cancelled = False
    if not flags:
        ask_one(engine, "a", flags="S")
    (pending,) = engine.submit([chunk("a", first, flags=flags, is_cancelled=lambda: is_cancelled)])
    engine.step()
    assert not pending.is_done
    is_cancelled = True
    assert served(engine, pending).error is None
    assert ask_one(engine, "a", second, flags="E").text == text_alone(np.append(first, second))
    assert +engine.parts.metrics.finished == {"end": 1}


def test_an_end_cancelled_after_its_first_step_still_ends_its_stream() -> None:
    engine, is_cancelled = golden_engine(), False
    (pending,) = engine.submit(
        [chunk("a", noise(1, seconds=4), flags="SE", is_cancelled=lambda: is_cancelled)]
    )
    engine.step()
    is_cancelled = True
    assert served(engine, pending).error is None
    assert +engine.parts.metrics.finished == {"end": 1}
    assert_all_is_free(engine)


NAN, INFINITE = np.float32("nan"), np.float32("-inf")


@pytest.mark.parametrize("bad", [NAN, INFINITE])
def test_a_chunk_with_a_value_that_is_no_number_is_refused_and_the_stream_goes_on(
    bad: np.float32,
) -> None:
    engine, samples = golden_engine(), noise(1)
    poisoned = samples.copy()
    poisoned[123] = bad
    ask_one(engine, "a", samples[:16000], flags="S")
    refused, neighbour = ask(engine, chunk("a", poisoned), chunk("b", noise(2), flags="SE"))
    error_of(refused, "sample 123", str(bad), "finite")
    assert neighbour.text == text_alone(noise(2))
    assert ask_one(engine, "a", samples[16000:], flags="E").text == text_alone(samples)


@pytest.mark.parametrize("flags", ["S", "E", "SE"])
def test_what_is_refused_at_either_end_leaves_no_stream_behind(flags: str) -> None:
    engine = golden_engine()
    if "S" not in flags:
        ask_one(engine, "a", noise(1), flags="S")
    error_of(ask_one(engine, "a", np.full(9, np.inf, np.float32), flags=flags), "inf")
    assert_all_is_free(engine)


def test_numbered_chunks_arrive_without_gap_or_repeat() -> None:
    engine, pieces = golden_engine(), np.split(noise(1), 4)

    def send(number: int | None, part: int, flags: str = "") -> str:
        parameters: dict[str, ParameterValue] = {} if number is None else {"chunk_seq": number}
        result = ask_one(engine, "a", pieces[part], flags=flags, parameters=parameters)
        return result.text if result.error is None else f"error: {result.error}"

    send(7, 0, "S")
    send(8, 1)
    for wrong in (8, 10, None):
        assert f"chunk_seq={wrong}, expected 9" in send(wrong, 2)
    send(9, 2)
    assert send(10, 3, "E") == text_alone(noise(1))


def test_options_after_start_are_refused_and_the_stream_goes_on() -> None:
    engine = golden_engine()
    ask_one(engine, "a", noise(1)[:9000], flags="S")
    late = chunk("a", noise(1)[9000:])._replace(options=StreamOptions(nbest=1))
    (result,) = engine.process([late])
    error_of(result, "options came after START", "The stream goes on without this request")
    on_the_wire = ask_one(engine, "a", noise(1)[9000:], parameters={"sample_rate": 8000})
    error_of(on_the_wire, "sample_rate=8000 came after START", "goes on without this request")
    assert ask_one(engine, "a", noise(1)[9000:], flags="E").text == text_alone(noise(1))


def test_an_ill_start_replaces_a_live_stream_of_its_id() -> None:
    engine = golden_engine()
    ask_one(engine, "a", noise(1), flags="S")
    result = ask_one(engine, "a", noise(1), flags="S", parameters={"sample_rate": "8000"})
    error_of(result, "sample_rate='8000' is of type str", "Nothing is open under this id now")
    replaced = [one.value for one in engine.readings() if one.labels == {"reason": "replaced"}]
    assert replaced == [1]
    assert_all_is_free(engine)


def test_a_stream_that_began_without_numbers_refuses_one() -> None:
    engine = golden_engine()
    ask_one(engine, "a", noise(1), flags="S")
    error_of(ask_one(engine, "a", parameters={"chunk_seq": 1}), "chunk_seq=1", "START had none")


def test_int16_and_float_of_the_same_audio_are_one_signal() -> None:
    pcm16 = (noise(1) * 32767).astype(np.int16)
    engine = golden_engine()
    ask_one(engine, "a", pcm16[:7000], flags="S")
    ask_one(engine, "a", pcm16[7000:20000].astype(np.float32) / 32768)
    told = ask_one(engine, "a", pcm16[20000:], flags="E")
    assert told.text == text_alone(pcm16.astype(np.float32) / 32768)


def test_loud_float_audio_is_counted_and_not_rescaled() -> None:
    engine, samples = golden_engine(), noise(1)
    loud = ask_one(engine, "a", samples * np.float32(32768), flags="SE")
    assert loud.error is None
    assert engine.parts.metrics.loud_chunks == 1
    ask_one(engine, "b", samples / np.abs(samples).max(), flags="SE")
    assert engine.parts.metrics.loud_chunks == 1


@pytest.mark.parametrize("head", [b"RIFF", b"RIFF\x24\x08\x00\x00WAVEfmt "])
@pytest.mark.parametrize("is_pcm16", [True, False])
def test_a_wav_header_is_refused_with_the_remedy(head: bytes, is_pcm16: bool) -> None:
    samples_S = np.frombuffer(head, np.int16 if is_pcm16 else np.float32)
    refused = ask_one(golden_engine(), "a", samples_S, flags="S")
    assert "strip" in error_of(refused, "RIFF", "header")


@pytest.mark.parametrize(
    ("flags", "fate"),
    [("S", "Nothing is open"), ("", "goes on without"), ("E", "closed too")],
)
@pytest.mark.parametrize(
    "wrong",
    [
        {"samples_S": np.full(9, np.nan, np.float32)},
        {"fault": InvalidRequestError("WAV_LENS=9 does not fit")},
        {"parameters": {"sample_rat": 16000}},
        {"parameters": {"chunk_seq": 7.5}},
    ],
    ids=["samples", "tensors", "option", "number"],
)
def test_a_refusal_tells_the_fate_of_the_stream_that_was_live(
    flags: str, fate: str, wrong: dict[str, Any]
) -> None:
    engine, samples = golden_engine(), noise(1)
    ask_one(engine, "a", samples[:16000], flags="S")
    request = {"samples_S": None, "flags": flags, **wrong}
    error_of(ask_one(engine, "a", request.pop("samples_S"), **request), fate)
    rest = ask_one(engine, "a", samples[16000:], flags="E")
    if flags == "":
        assert rest.text == text_alone(samples)
    else:
        error_of(rest, "'a' is unknown", "send START")
    assert_all_is_free(engine)


@pytest.mark.parametrize("loud", [3e14, -1e30, 2.0**31 * 1.1])
def test_a_sample_that_would_overflow_the_features_is_refused(loud: float) -> None:
    engine, samples = golden_engine(), noise(1)
    ask_one(engine, "a", samples[:16000], flags="S")
    spoilt = samples.copy()
    spoilt[77] = loud
    error_of(ask_one(engine, "a", spoilt), "sample 77", "finite values in [-1, 1]")
    assert ask_one(engine, "a", samples[16000:], flags="E").text == text_alone(samples)


def test_the_largest_sample_that_is_taken_leaves_the_features_finite() -> None:
    engine, samples = golden_engine(), noise(1)
    ask_one(engine, "a", np.full(16000, 2.0**31, np.float32), flags="S")
    ask_one(engine, "a", noise(2, seconds=8))
    quiet_again = ask_one(engine, "a", np.concatenate([samples] * 2), flags="E")
    assert quiet_again.text
    assert engine.parts.metrics.loud_chunks == 1


def test_refusals_are_logged_with_the_id_but_do_not_flood(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    engine = golden_engine(clock)
    for number in range(50):
        ask_one(engine, f"gone-{number}", noise(1))
    assert "event=request_refused stream='gone-0' error=UnknownStreamError" in caplog.text
    assert "gone-49" not in caplog.text
    clock.now_s += 1
    ask_one(engine, "later", noise(1))
    assert "event=refusals_not_logged count=30" in caplog.text
    assert "stream='later'" in caplog.text


def test_g711_codes_outside_a_byte_are_refused() -> None:
    engine = golden_engine()
    codes = np.array([0, 255, 256], np.int16)
    for wrong in (codes, codes - 1, codes[:2].astype(np.float32)):
        bad = ask_one(engine, "a", wrong, flags="S", parameters={"encoding": "mulaw"})
        error_of(bad, "mulaw", "0 .. 255")
    good = ask_one(engine, "a", codes[:2], flags="SE", parameters={"encoding": "mulaw"})
    assert good.error is None


def test_what_happens_to_a_stream_is_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    engine = golden_engine(clock)
    with caplog.at_level(logging.INFO, logger="oasr_backend"):
        ask_one(engine, "call-1", noise(1), flags="S")
        ask_one(engine, "call-1", flags="E")
        ask_one(engine, "call-2", flags="S")
        clock.now_s += 1000
        engine.close_idle()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "event=stream_open stream='call-1' generation=1",
        "event=stream_close stream='call-1' generation=1 reason=end audio_s=2.00",
        "event=stream_open stream='call-2' generation=2",
        "event=stream_reaped stream='call-2' generation=2 reason=idle audio_s=0.00",
    ]


@contextlib.contextmanager
def step_under_way(engine: Engine) -> Iterator[None]:
    """Inside, a step of the engine is in the middle of the model."""
    has_begun, may_end = threading.Event(), threading.Event()

    def pause(_samples_BS: Tensor) -> None:
        has_begun.set()
        may_end.wait(GUARD_S)

    stepper = threading.Thread(target=engine.step)
    with fault_at(engine, "filterbank", pause):
        stepper.start()
        try:
            assert has_begun.wait(GUARD_S)
            yield
        finally:
            may_end.set()
            stepper.join()


def test_a_start_is_refused_while_a_step_goes_on() -> None:
    engine = golden_engine(max_streams=1)
    (pending,) = engine.submit([chunk("a", noise(1), flags="SE")])
    with step_under_way(engine):
        (late,) = engine.submit([chunk("b", noise(1), flags="S")])
        assert late.result is not None
        error_of(late.result, "'b'", "max_streams is 1")
        assert not pending.is_done


def test_a_stream_opened_during_a_step_is_as_any_other() -> None:
    engine = golden_engine(max_streams=2)
    (first,) = engine.submit([chunk("a", noise(1), flags="SE")])
    with step_under_way(engine):
        (second,) = engine.submit([chunk("b", noise(2), flags="SE")])
    while not (first.is_done and second.is_done):
        engine.step()
    texts = [pending.result.text for pending in (first, second) if pending.result is not None]
    assert texts == [text_alone(noise(1)), text_alone(noise(2))]
    assert_all_is_free(engine)


def test_a_full_server_does_not_take_a_stream_that_is_being_served_for_dead() -> None:
    clock = ManualClock()
    engine = golden_engine(clock, max_streams=1, dead_after_s=60)
    (pending,) = engine.submit([chunk("a", noise(1), flags="S")])
    with step_under_way(engine):
        clock.now_s += 61
        (late,) = engine.submit([chunk("b", noise(2), flags="S")])
        assert late.result is not None
        error_of(late.result, "max_streams is 1")
    while not pending.is_done:
        engine.step()
    assert ask_one(engine, "a", flags="E").text == text_alone(noise(1))


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ("S", {"parameters": {"sample_rat": 16000}}),
        ("", {"parameters": {"late": 1}}),
        ("E", {"parameters": {"chunk_seq": 3}}),
        ("", {"fault": InvalidRequestError("unreadable")}),
        ("", {"is_cancelled": lambda: True}),
        ("stranger", {}),
    ],
    ids=["option", "late option", "number", "tensors", "cancelled", "unknown stream"],
)
def test_a_refusal_lets_go_of_the_audio_without_the_garbage_collector(
    flags: str, wrong: dict[str, Any]
) -> None:
    engine, audio = golden_engine(), noise(1)
    if flags != "stranger":
        ask_one(engine, "a", noise(2), flags="S")
    gone = weakref.ref(audio)
    gc.disable()
    try:
        (pending,) = engine.submit(
            [chunk("a", audio, flags=flags.removeprefix("stranger"), **wrong)]
        )
        assert pending.result is not None
        assert pending.result.error is not None
        result = pending.result
        del pending, audio
        assert gone() is None, "an error's frames keep it"
        assert result.error is not None
    finally:
        gc.enable()
