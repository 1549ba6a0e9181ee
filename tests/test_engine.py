"""The order of things: one answer a request and one text a stream, alone or in company."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

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
    golden_engine,
    noise,
    text_alone,
)


def test_start_and_end_in_one_request_gives_the_final_text() -> None:
    engine = golden_engine()
    result = ask_one(engine, "a", noise(1), flags="SE", wants_result=True)
    assert result.text == text_alone(noise(1))
    assert result.document is not None
    assert result.document["is_final"]
    assert result.document["finish_reason"] == "end"
    assert result.document["audio_s"] == 2.0
    assert_all_is_free(engine)


def test_the_document_is_built_only_on_request() -> None:
    assert ask_one(golden_engine(), "a", noise(1), flags="SE").document is None


@pytest.mark.parametrize("piece", [1, 7, 160, 399, STRIDE_SAMPLES, WINDOW_SAMPLES, 31999])
def test_the_text_does_not_depend_on_the_cutting(piece: int) -> None:
    samples = noise(2, seconds=0.9) if piece < 100 else noise(2)
    engine = golden_engine()
    pieces = [samples[start : start + piece] for start in range(0, samples.size, piece)]
    for index, part in enumerate(pieces):
        flags = ("S" if index == 0 else "") + ("E" if index == len(pieces) - 1 else "")
        (result,) = engine.process([chunk("a", part, flags=flags)])
    assert result.text == text_alone(samples)
    assert_all_is_free(engine)


def test_sixteen_bit_samples_share_a_step_with_floats_and_without() -> None:
    codes = [np.round(noise(seed) * 32767).astype(np.int16) for seed in (4, 5)]
    alone = [text_alone(pcm16.astype(np.float32) / 32768) for pcm16 in codes]
    assert alone[0] != alone[1]
    engine = golden_engine()
    for streams in ((codes[0], codes[1]), (codes[0], codes[1] / np.float32(32768))):
        asked = [chunk(index, samples, flags="SE") for index, samples in enumerate(streams)]
        assert [result.text for result in engine.process(asked)] == alone
    width = engine.parts.metrics.step_width
    assert width.total == 2 * sum(width.counts), "a stream stepped alone"
    assert_all_is_free(engine)


def test_a_wide_step_in_two_parts_gives_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=3)
    results = engine.process([chunk(seed, noise(seed), flags="SE") for seed in range(7)])
    assert [result.text for result in results] == [text_alone(noise(seed)) for seed in range(7)]
    width = engine.parts.metrics.step_width
    assert width.counts[:4] == [1, 1, 1, 3], "four, three times seven, then two and one"
    assert engine.parts.metrics.compute_s == pytest.approx(engine.parts.metrics.step_s.total)
    assert_all_is_free(engine)


def test_one_part_is_answered_while_the_device_is_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=2)
    ask(engine, *(chunk(seed, noise(seed)[:STRIDE_SAMPLES], flags="S") for seed in range(4)))
    told, in_flight = engine._desk._tell, []

    def tell(heard: Any) -> None:
        in_flight.append([stream.num_in_flight for stream in engine.streams])
        told(heard)

    monkeypatch.setattr(engine._desk, "_tell", tell)
    second = slice(STRIDE_SAMPLES, 2 * STRIDE_SAMPLES)
    ask(engine, *(chunk(seed, noise(seed)[second]) for seed in range(4)))
    assert in_flight == [[0, 0, 1, 1], [0, 0, 0, 0]]
    engine.close()
    assert_all_is_free(engine)


def test_last_windows_share_the_step_of_those_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_that_runs_ahead(monkeypatch, least_split_width=128)
    utterances = [noise(seed) for seed in range(6)]
    begun = WINDOW_SAMPLES - 1
    engine.process([chunk(seed, noise(seed)[:begun], flags="S") for seed in range(6)])
    ends = begun + STRIDE_SAMPLES
    chunks = [chunk(seed, utterances[seed][begun:ends]) for seed in range(4)]
    chunks += [chunk(seed, utterances[seed][begun:ends], flags="E") for seed in (4, 5)]
    results = engine.process(chunks)
    assert [result.text for result in results[4:]] == [
        text_alone(utterances[seed][:ends]) for seed in (4, 5)
    ]
    width = engine.parts.metrics.step_width
    assert (sum(width.counts), width.total) == (3, 3 + 5 + 2), "one window of four, three of two"
    finals = engine.process([chunk(seed, utterances[seed][ends:], flags="E") for seed in range(4)])
    assert [result.text for result in finals] == [text_alone(one) for one in utterances[:4]]
    assert_all_is_free(engine)


def test_partial_texts_are_beginnings_of_the_final_one() -> None:
    engine, samples = golden_engine(), noise(3, seconds=4)
    texts = [ask_one(engine, "a", samples[:8000], flags="S").text]
    texts += [ask_one(engine, "a", samples[start : start + 8000]).text
              for start in range(8000, samples.size, 8000)]  # fmt: skip
    texts.append(ask_one(engine, "a", flags="E").text)
    assert texts[0] == "", "half a second is less than a window"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == text_alone(samples)


@pytest.mark.parametrize(
    "num_samples",
    [0, 1, 399, 400, WINDOW_SAMPLES - 1, WINDOW_SAMPLES, WINDOW_SAMPLES + 1, STRIDE_SAMPLES],
)
@pytest.mark.parametrize("tail_padding", [True, False])
def test_an_utterance_of_any_length_has_a_final_text(num_samples: int, tail_padding: bool) -> None:
    engine = golden_engine(tail_padding=tail_padding)
    result = ask_one(engine, "a", noise(4)[:num_samples], flags="SE")
    assert result.error is None
    assert isinstance(result.text, str)
    if num_samples == 0:
        assert result.text == ""
    assert_all_is_free(engine)


def test_lengths_around_a_window_edge_are_one_text_however_they_are_cut() -> None:
    samples = noise(5, seconds=1.5)
    for num_samples in range(WINDOW_SAMPLES - 2, WINDOW_SAMPLES + 3):
        engine = golden_engine()
        ask_one(engine, "a", samples[: num_samples - 1], flags="S")
        last = ask_one(engine, "a", samples[num_samples - 1 : num_samples], flags="E")
        assert last.text == text_alone(samples[:num_samples])


def test_an_end_without_samples_hears_what_was_buffered() -> None:
    engine, samples = golden_engine(), noise(6)
    ask_one(engine, "a", samples, flags="S")
    assert ask_one(engine, "a", flags="E").text == text_alone(samples)
    assert_all_is_free(engine)


def test_neighbours_do_not_change_a_text() -> None:
    utterances = [noise(seed, seconds=0.3 + 0.4 * seed) for seed in range(8)]
    engine = golden_engine(max_step_streams=5)
    results = ask(engine, *(chunk(i, x, flags="SE") for i, x in enumerate(utterances)))
    assert [result.text for result in results] == [text_alone(x) for x in utterances]
    assert len({result.text for result in results}) > 3, "else this test sees no mix-up"


def test_shuffled_batches_give_every_id_its_own_text() -> None:
    chance = np.random.default_rng(7)
    utterances = {f"id{seed}": noise(seed) for seed in range(8)}
    engine = golden_engine()
    ask(engine, *(chunk(name, flags="S") for name in utterances))
    for start in range(0, 32000, 4000):
        names = chance.permutation(list(utterances))[: chance.integers(6, 9)]
        for name in {*names} ^ {*utterances}:
            ask_one(engine, name, utterances[name][start : start + 4000])
        ask(engine, *(chunk(str(n), utterances[str(n)][start : start + 4000]) for n in names))
    finals = ask(engine, *(chunk(name, flags="E") for name in utterances))
    assert [r.text for r in finals] == [text_alone(x) for x in utterances.values()]


def test_an_integer_and_a_string_id_are_two_streams() -> None:
    engine = golden_engine()
    ask(engine, chunk(42, noise(1), flags="S"), chunk("42", noise(2), flags="S"))
    number, string = ask(engine, chunk(42, flags="E"), chunk("42", flags="E"))
    assert (number.text, string.text) == (text_alone(noise(1)), text_alone(noise(2)))


def test_an_id_is_free_again_right_after_its_end() -> None:
    engine = golden_engine(max_streams=1)
    for seed in range(5):
        ask_one(engine, 7, noise(seed), flags="S")
        assert ask_one(engine, 7, flags="E").text == text_alone(noise(seed))


def test_a_continuation_of_an_unknown_id_is_told_to_start() -> None:
    engine = golden_engine()
    for flags in ("", "E"):
        result = ask_one(engine, "nobody", noise(1), flags=flags)
        assert result.error is not None
        assert result.error.triton_code == "INVALID_ARG"
        error_of(result, "'nobody'", "unknown", "send START")
    assert_all_is_free(engine)


def test_answers_come_in_the_order_of_the_requests() -> None:
    engine = golden_engine()
    good = [chunk(i, noise(i), flags="SE") for i in range(4)]
    mixed: list[AudioChunk] = [chunk("x"), good[0], good[1], chunk("y"), good[2], good[3]]
    results = ask(engine, *mixed)
    assert [result.error is not None for result in results] == [True, False, False] * 2
    texts = [result.text for result in results if result.error is None]
    assert texts == [text_alone(noise(i)) for i in range(4)]


def test_a_long_chunk_takes_turns_with_the_others() -> None:
    engine = golden_engine(max_step_streams=4)
    (long,) = engine.submit([chunk("long", noise(1, seconds=25), flags="SE")])
    engine.step()
    others = engine.submit([chunk(i, noise(i), flags="SE") for i in range(2, 8)])
    num_steps = 0
    while not all(turn.is_done for turn in others):
        engine.step()
        num_steps += 1
    # Two seconds are three windows and one of padding; seven streams need two steps for each.
    assert num_steps <= 8
    assert not long.is_done
    while not long.is_done:
        engine.step()
    assert long.result is not None
    assert long.result.text == text_alone(noise(1, seconds=25))
    assert_all_is_free(engine)


def test_small_chunks_queued_at_once_are_all_answered_in_order() -> None:
    engine, samples = golden_engine(), noise(8, seconds=4)
    pieces = np.array_split(samples, 200)
    chunks = [chunk("a", part, flags="S" if i == 0 else "") for i, part in enumerate(pieces)]
    results = ask(engine, *chunks, chunk("a", flags="E"))
    assert all(result.error is None for result in results)
    lengths = [len(result.text) for result in results]
    assert lengths == sorted(lengths)
    assert results[-1].text == text_alone(samples)


def test_closing_answers_what_waits_and_frees_every_stream() -> None:
    engine = golden_engine()
    ask_one(engine, "idle", noise(1), flags="S")
    turns = engine.submit([chunk(i, noise(i, seconds=20), flags="S") for i in range(3)])
    engine.step()
    engine.close()
    for turn in turns:
        assert turn.result is not None
        error_of(turn.result, "unloads", "send START")
    assert_all_is_free(engine)
    engine.close()
