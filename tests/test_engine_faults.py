"""A failing step, a full device or a lost one costs its own streams and no other."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import oasr_backend.streaming.engine as engine_module
import oasr_backend.streaming.step as step_module
from oasr_backend.decoders.greedy import GreedySearch
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.streams import Stream
from oasr_backend.types import AudioChunk
from tests.engine_helpers import (
    STRIDE_SAMPLES,
    WINDOW_SAMPLES,
    ask,
    ask_one,
    assert_all_is_free,
    chunk,
    engine_that_runs_ahead,
    error_of,
    fault_at,
    golden_engine,
    marked,
    noise,
    on_mark,
    text_alone,
)


def test_a_failing_step_closes_the_streams_of_that_step_only() -> None:
    engine = golden_engine(max_step_streams=2)
    ask_one(engine, "early", noise(1), flags="S")
    chunks = [chunk("bad", marked(noise(2)), flags="SE"), chunk("beside", noise(3), flags="S")]
    chunks += [chunk(i, noise(i), flags="SE") for i in (4, 5)]
    with fault_at(engine, "filterbank", on_mark(ValueError("no such kernel"))):
        bad, beside, *others = ask(engine, *chunks)
    for result in (bad, beside):
        assert result.error is not None
        assert result.error.triton_code == "INTERNAL"
        error_of(result, "no such kernel", "send START")
    error_of(bad, "'bad'")
    assert [result.text for result in others] == [text_alone(noise(i)) for i in (4, 5)]
    assert ask_one(engine, "early", flags="E").text == text_alone(noise(1))
    error_of(ask_one(engine, "beside"), "unknown", "send START")
    assert engine.is_healthy
    assert_all_is_free(engine)


@pytest.mark.parametrize("bad_one", [0, 3])
def test_a_part_that_fails_leaves_the_other_part_alone(
    bad_one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=4)
    audio = [marked(noise(seed)) if seed == bad_one else noise(seed) for seed in range(4)]
    chunks = [chunk(seed, one[:WINDOW_SAMPLES], flags="S") for seed, one in enumerate(audio)]
    with fault_at(engine, "filterbank", on_mark(ValueError("no such kernel"))):
        results = ask(engine, *chunks)
    beside = {0, 1} if bad_one < 2 else {2, 3}
    for seed, result in enumerate(results):
        if seed in beside:
            error_of(result, "no such kernel", "send START")
        else:
            final = ask_one(engine, seed, noise(seed)[WINDOW_SAMPLES:], flags="E")
            assert final.text == text_alone(noise(seed))
    assert_all_is_free(engine)


def test_a_first_part_that_fails_late_leaves_the_third_part_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails as it is read, when its streams are in flight and wait for a further window."""
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=4)
    extend, abort, num_calls = GreedySearch.extend, engine.parts.admission.abort, itertools.count()
    in_flight = []

    def failing_first(search: GreedySearch, *args: Any) -> None:
        if next(num_calls) == 0:
            raise ValueError("no such token")
        extend(search, *args)

    def watched_abort(stream: Stream, *, reason: str) -> None:
        in_flight.append(stream.num_in_flight)
        abort(stream, reason=reason)

    monkeypatch.setattr(GreedySearch, "extend", failing_first)
    monkeypatch.setattr(engine.parts.admission, "abort", watched_abort)
    results = ask(engine, *(chunk(seed, noise(seed), flags="SE") for seed in range(4)))
    for result in results[:2]:
        error_of(result, "no such token", "send START")
    assert [result.text for result in results[2:]] == [text_alone(noise(n)) for n in (2, 3)]
    assert in_flight == [0, 0], "a slot was free while the device might still write to it"
    assert_all_is_free(engine)


@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_stream_that_cannot_be_freed_costs_its_rows_and_nobody_an_answer(
    is_ended: bool, num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=4)
    close, num_calls = engine.store.decoders.close, itertools.count()

    def failing_close(slot: int) -> None:
        close(slot)
        if next(num_calls) < num_failures:
            raise RuntimeError("no such row")

    monkeypatch.setattr(engine.store.decoders, "close", failing_close)
    audio = [noise(seed)[:WINDOW_SAMPLES] for seed in range(4)]
    if not is_ended:
        audio[0] = marked(audio[0])
    flags = "SE" if is_ended else "S"
    with fault_at(engine, "filterbank", on_mark(ValueError("no such kernel"))):
        results = ask(engine, *(chunk(seed, one, flags=flags) for seed, one in enumerate(audio)))
    for seed, result in enumerate(results):
        if is_ended:
            assert result.text == text_alone(audio[seed])
        elif seed < 2:
            error_of(result, "no such kernel", "send START")
        else:
            final = ask_one(engine, seed, noise(seed)[WINDOW_SAMPLES:], flags="E")
            assert final.text == text_alone(noise(seed))
    assert len(engine.streams) == 0
    monkeypatch.undo()
    assert ask_one(engine, 0, noise(0), flags="SE").text == text_alone(noise(0))


def test_a_part_that_lands_badly_leaves_the_other_part_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=4)
    conclude, num_calls = engine.steppers[0].conclude, itertools.count()

    def failing_first(streams: Sequence[Stream]) -> None:
        if next(num_calls) == 0:
            raise RuntimeError("a fault of the engine")
        conclude(streams)

    monkeypatch.setattr(engine.steppers[0], "conclude", failing_first)
    turns = engine.submit(
        [chunk(seed, noise(seed)[:WINDOW_SAMPLES], flags="S") for seed in range(4)]
    )
    engine.step()
    for turn in turns[:2]:
        assert turn.result is not None
        error_of(turn.result, "a fault of the engine", "send START")
    assert [turn.stream.num_in_flight for turn in turns if turn.stream] == [0] * 4
    for seed in (2, 3):
        final = ask_one(engine, seed, noise(seed)[WINDOW_SAMPLES:], flags="E")
        assert final.text == text_alone(noise(seed))
    assert_all_is_free(engine)


#: Parts of a step that no guard for single streams surrounds: whose attribute, and its name.
STEP_PARTS: tuple[tuple[Callable[[Engine], Any], str], ...] = (
    (lambda _engine: engine_module, "next_batch"),
    (lambda _engine: step_module, "split_step"),
    (lambda _engine: engine_module, "on_device"),
    (lambda engine: engine.steppers[0], "without_full"),
    (lambda engine: engine.steppers[0], "_launch"),
    (lambda engine: engine.steppers[0], "_land"),
    (lambda engine: engine.steppers[0], "conclude"),
    (lambda engine: engine._desk.queues, "stepped"),
    (lambda engine: engine._desk.queues, "pop"),
    (lambda engine: engine.parts.metrics, "step_done"),
)


@pytest.mark.parametrize("failing_call", [0, 1, 2])
@pytest.mark.parametrize(("owner", "name"), STEP_PARTS, ids=[name for _, name in STEP_PARTS])
def test_a_step_that_fails_as_a_whole_refuses_its_heads_and_serves_the_next(
    owner: Callable[[Engine], Any], name: str, failing_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=4)
    part, num_calls = getattr(owner(engine), name), itertools.count()

    def failing_once(*args: Any, **more: Any) -> Any:
        if next(num_calls) == failing_call:
            raise ZeroDivisionError("of the step itself")
        return part(*args, **more)

    monkeypatch.setattr(owner(engine), name, failing_once)
    first = [chunk(seed, noise(seed), flags="SE") for seed in range(4)]
    behind = [chunk(seed, noise(seed + 4), flags="SE") for seed in range(4)]
    results = ask(engine, *first, *behind)
    assert next(num_calls) > failing_call
    for seed, result in enumerate(results):
        if result.error is None:
            assert result.text == text_alone(noise(seed))
        else:
            error_of(result, "of the step itself", "send START")
            assert result.error.triton_code == "INTERNAL"
    assert ask_one(engine, 0, noise(0), flags="SE").text == text_alone(noise(0))
    assert_all_is_free(engine)


def test_a_step_that_can_never_run_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = golden_engine()

    def failing(*_args: Any, **_more: Any) -> None:
        raise ZeroDivisionError("of the step itself")

    monkeypatch.setattr(engine_module, "next_batch", failing)
    chunks = [chunk(seed % 2, noise(seed), flags="SE") for seed in range(6)]
    for result in ask(engine, *chunks):
        error_of(result, "of the step itself", "send START")
    assert_all_is_free(engine)


def test_streams_beyond_the_width_of_a_failed_step_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = golden_engine(max_step_streams=2)
    step, num_calls = engine.steppers[0].run, itertools.count()

    def failing_first(streams: Sequence[Stream]) -> None:
        if next(num_calls) == 0:
            raise ZeroDivisionError("of the step itself")
        step(streams)

    monkeypatch.setattr(engine.steppers[0], "run", failing_first)
    results = ask(engine, *(chunk(seed, noise(seed), flags="SE") for seed in range(4)))
    for result in results[:2]:
        error_of(result, "of the step itself", "send START")
    assert [result.text for result in results[2:]] == [text_alone(noise(seed)) for seed in (2, 3)]
    assert_all_is_free(engine)


def test_an_admission_that_fails_behind_the_requests_answers_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a window no step would answer them."""
    engine = golden_engine()

    def failing(_heads: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("of the step itself")

    monkeypatch.setattr(engine._desk, "_settle", failing)
    for result in ask(engine, *(chunk(seed, flags="S") for seed in range(3))):
        error_of(result, "of the step itself", "send START")
    assert_all_is_free(engine)


@pytest.mark.parametrize("bad_window", [0, 1, 2])
def test_whoever_waits_behind_a_failed_stream_is_served(
    bad_window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=2, max_streams=4)
    chunks = [chunk(0, marked(noise(0), window=bad_window), flags="SE")]
    chunks += [chunk(seed, noise(seed), flags="SE") for seed in (1, 2, 3)]
    chunks += [chunk(seed, noise(seed + 4), flags="SE") for seed in range(4)]
    with fault_at(engine, "filterbank", on_mark(ValueError("no such kernel"))):
        results = ask(engine, *chunks)
    # Later windows of the first part share a step with the second part's.
    num_failed = 2 if bad_window == 0 else 4
    for result in results[:num_failed]:
        error_of(result, "no such kernel", "send START")
    texts = [text_alone(noise(seed)) for seed in range(num_failed, 8)]
    assert [result.text for result in results[num_failed:]] == texts
    assert_all_is_free(engine)


@pytest.mark.parametrize("part", ["filterbank", "ctc"])
def test_slots_of_failed_streams_serve_the_next_ones_correctly(part: str) -> None:
    engine = golden_engine(max_streams=2)
    with fault_at(engine, part, lambda _: ValueError("boom")):
        for result in ask(engine, *(chunk(i, noise(i, seconds=5), flags="S") for i in range(2))):
            error_of(result, "boom")
    assert_all_is_free(engine)
    results = ask(engine, *(chunk(i, noise(i), flags="SE") for i in range(2)))
    assert [result.text for result in results] == [text_alone(noise(i)) for i in range(2)]


@pytest.mark.parametrize("part", ["filterbank", "ctc"])
@pytest.mark.parametrize("most_rows", [1, 3])
def test_running_out_of_memory_halves_the_step_until_it_fits(part: str, most_rows: int) -> None:
    engine = golden_engine()
    widths: list[int] = []

    def too_wide(rows: torch.Tensor) -> Exception | None:
        widths.append(len(rows))
        return torch.OutOfMemoryError("full") if len(rows) > most_rows else None

    with fault_at(engine, part, too_wide):
        results = ask(engine, *(chunk(i, noise(i), flags="SE") for i in range(8)))
    assert max(widths) == 8
    assert [result.text for result in results] == [text_alone(noise(i)) for i in range(8)]
    assert_all_is_free(engine)


def test_a_single_row_that_does_not_fit_fails_its_stream_and_no_device() -> None:
    engine = golden_engine()
    with fault_at(engine, "filterbank", on_mark(torch.OutOfMemoryError("full"))):
        bad, good = ask(
            engine,
            chunk("bad", marked(noise(1)), flags="SE"),
            chunk("good", noise(2)[:5000], flags="S"),
        )
    error_of(bad, "full", "send START")
    assert good.error is None
    assert ask_one(engine, "good", noise(2)[5000:], flags="E").text == text_alone(noise(2))
    assert engine.is_healthy
    assert_all_is_free(engine)


def test_a_lost_device_makes_the_engine_unhealthy_and_every_request_unavailable() -> None:
    engine = golden_engine()
    ask_one(engine, "open", noise(1)[:5000], flags="S")
    with fault_at(engine, "filterbank", on_mark(RuntimeError("CUDA error: an illegal access"))):
        lost = ask_one(engine, "bad", marked(noise(2)), flags="S")
    assert not engine.is_healthy
    for result in (lost, ask_one(engine, "open"), ask_one(engine, "new", noise(3), flags="S")):
        assert result.error is not None
        assert result.error.triton_code == "UNAVAILABLE"
        error_of(result, "illegal access", "restarted")
    assert {sample.name: sample.value for sample in engine.readings()}["oasr_healthy"] == 0
    engine.close()
    assert_all_is_free(engine)


def test_a_failed_step_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    engine = golden_engine()
    with (
        caplog.at_level(logging.ERROR, logger="oasr_backend"),
        fault_at(engine, "ctc", lambda _: ValueError("boom")),
    ):
        ask_one(engine, "a", noise(1), flags="S")
    (failed,) = caplog.records
    assert "event=step_failed streams=1" in failed.getMessage()
    assert failed.exc_info is not None


def test_a_fault_in_an_answer_costs_its_stream_and_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = golden_engine()
    told = engine.parts.results.document

    def document(text: str, stream: Stream) -> dict[str, Any]:
        if stream.stream_id == "victim":
            raise ZeroDivisionError("of its own")
        return told(text, stream)

    monkeypatch.setattr(engine.parts.results, "document", document)
    good, bad = engine.process(
        [
            chunk("good", noise(1), flags="SE", wants_result=True),
            chunk("victim", noise(2), flags="SE", wants_result=True),
        ]
    )
    error_of(bad, "'victim' ends", "of its own", "send START")
    assert good.text == text_alone(noise(1))
    assert_all_is_free(engine)


def test_a_fault_in_admission_refuses_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = golden_engine()
    admit = engine.parts.admission.admit

    def failing(request: AudioChunk, *, now_s: float) -> Stream:
        if request.stream_id == "victim":
            raise ZeroDivisionError("of its own")
        return admit(request, now_s=now_s)

    monkeypatch.setattr(engine.parts.admission, "admit", failing)
    bad, good = ask(
        engine, chunk("victim", noise(2), flags="SE"), chunk("good", noise(1), flags="SE")
    )
    error_of(bad, "'victim'", "of its own")
    assert good.text == text_alone(noise(1))
    assert_all_is_free(engine)


def test_unlimited_history_ends_at_its_ceiling_with_a_text() -> None:
    engine = golden_engine(num_left_chunks=-1, max_blocks_per_seq=3)
    samples = noise(1, seconds=6)
    result = ask_one(engine, "a", samples, flags="S", wants_result=True)
    assert result.error is None
    assert result.document is not None
    assert result.document["finish_reason"] == "length"
    assert result.document["is_final"]
    assert result.document["num_frames"] == 3 * 16
    assert (result.document["audio_s"], result.document["decoded_s"]) == (6.0, 3 * 0.64)
    heard = samples[: WINDOW_SAMPLES + 2 * STRIDE_SAMPLES]
    assert result.text == text_alone(heard, num_left_chunks=-1, tail_padding=False)
    assert engine.store.kv.pool.num_free_blocks == engine.store.kv.pool.num_blocks
    message = error_of(ask_one(engine, "a", samples), "'a'", "length", "send START")
    assert "48 frames" in message
    assert ask_one(engine, "a", samples, flags="SE").error is None
    assert_all_is_free(engine)


def test_an_end_beyond_the_ceiling_is_the_final_text_or_a_clear_error() -> None:
    engine = golden_engine(num_left_chunks=-1, max_blocks_per_seq=3)
    final = ask_one(engine, "a", noise(1, seconds=6), flags="SE", wants_result=True)
    assert final.document is not None
    assert final.document["finish_reason"] == "length"
    assert_all_is_free(engine)
    ask_one(engine, "b", noise(1, seconds=6), flags="S")
    error_of(ask_one(engine, "b", flags="E"), "length", "send START")
    assert_all_is_free(engine)


def test_a_neighbour_at_its_ceiling_disturbs_nobody() -> None:
    engine = golden_engine(num_left_chunks=-1, max_blocks_per_seq=6)
    short = noise(2, seconds=3)
    long, result = ask(
        engine, chunk("long", noise(1, seconds=9), flags="S"), chunk("short", short, flags="SE")
    )
    assert long.error is None
    assert result.text == text_alone(short, num_left_chunks=-1)
    assert +engine.parts.metrics.finished == {"end": 1, "length": 1}


@pytest.mark.parametrize("num_left_chunks", [0, 1, 4])
def test_a_long_stream_holds_a_bounded_number_of_blocks(num_left_chunks: int) -> None:
    engine = golden_engine(num_left_chunks=num_left_chunks, position_limit_frames=200)
    pool = engine.store.kv.pool
    ask_one(engine, "a", flags="S")
    for seed in range(12):
        ask_one(engine, "a", noise(seed, seconds=2))
        assert pool.num_blocks - pool.num_free_blocks <= num_left_chunks + 1
    final = ask_one(engine, "a", flags="E", wants_result=True)
    assert final.document is not None
    assert final.document["num_frames"] > 200
    assert_all_is_free(engine)


def test_hundreds_of_short_streams_leave_every_block_free() -> None:
    engine = golden_engine()
    for round_number in range(50):
        ask(engine, *(chunk(f"{round_number}-{i}", noise(i)[:12000], flags="SE") for i in range(8)))
    assert_all_is_free(engine)
    assert engine.parts.metrics.streams_opened == 400
