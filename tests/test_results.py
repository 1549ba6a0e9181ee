"""The RESULT document: its fields, the entries that it leaves out, and its cost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import soundfile

from oasr_backend.config import ServingConfig
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import Samples
from tests.conftest import DEMO_DIR, Clip
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
from tests.result_schema import check_document
from tests.same_results import assert_same_results

BEAM = {"decoder": "prefix_beam"}
EVERYTHING = {**BEAM, "nbest": 4, "word_times": True, "endpoint": True}


def told(engine: Engine, samples_S: Samples, **parameters: Any) -> dict[str, Any]:
    result = ask_one(engine, "a", samples_S, flags="SE", parameters=parameters, wants_result=True)
    assert result.error is None
    document = check_document(result.document)
    assert document["text"] == result.text
    return document


def test_without_options_nothing_beyond_the_text_is_there() -> None:
    document = told(golden_engine(), noise(1))
    assert not {"tokens", "words", "nbest", "segments"} & set(document)
    assert document["step_ms"] > 0


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ({"word_times": True}, {"tokens", "words"}),
        ({**BEAM, "nbest": 3}, {"nbest"}),
        ({"endpoint": True}, {"segments"}),
        (EVERYTHING, {"tokens", "words", "nbest", "segments"}),
    ],
)
def test_each_option_adds_its_own_fields(parameters: dict[str, Any], names: set[str]) -> None:
    document = told(golden_engine(), noise(1), **parameters)
    assert {"tokens", "words", "nbest", "segments"} & set(document) == names


def test_a_server_may_give_its_streams_other_defaults() -> None:
    engine = golden_engine(decoder="prefix_beam", nbest=2, word_times=True)
    document = told(engine, noise(1))
    assert len(document["nbest"]) == 2
    assert document["words"]
    assert "nbest" not in told(engine, noise(1), decoder="greedy"), "a choice the stream made"


def test_every_partial_document_keeps_the_promise() -> None:
    engine, samples_S = golden_engine(), noise(3, seconds=4)
    for start in range(0, samples_S.size, 8000):
        flags = ("S" if start == 0 else "") + ("E" if start + 8000 >= samples_S.size else "")
        parameters = EVERYTHING if start == 0 else {}
        result = ask_one(
            engine, "a", samples_S[start : start + 8000], flags=flags,
            parameters=parameters, wants_result=True,
        )  # fmt: skip
        assert check_document(result.document)["is_final"] == ("E" in flags)
    assert_all_is_free(engine)


def test_the_best_of_n_is_the_text_and_scores_are_the_decoders_own() -> None:
    engine = golden_engine()
    ask_one(engine, "a", noise(1), flags="S", parameters={**BEAM, "nbest": 5})
    (stream,) = engine.streams
    document = check_document(ask_one(engine, "a", wants_result=True).document)
    found = engine.store.decoders.nbest(stream.slot, 5)
    assert [entry["score"] for entry in document["nbest"]] == [one.score for one in found]
    assert [entry["tokens"] for entry in document["nbest"]] == [list(one.tokens) for one in found]
    assert document["nbest"][0]["text"] == document["text"]
    assert len({entry["text"] for entry in document["nbest"]}) > 1


def partials(mode: str, **parameters: Any) -> list[str]:
    engine, samples_S = golden_engine(), noise(5, seconds=5)
    texts = []
    for start in range(0, samples_S.size, 16000):
        flags = ("S" if start == 0 else "") + ("E" if start + 16000 >= samples_S.size else "")
        options = {"partials": mode, **parameters} if start == 0 else {}
        piece_S = samples_S[start : start + 16000]
        texts.append(ask_one(engine, "a", piece_S, flags=flags, parameters=options).text)
    return texts


@pytest.mark.parametrize("parameters", [{}, BEAM])
def test_partials_show_nothing_the_stable_part_or_all(parameters: dict[str, Any]) -> None:
    every, stable, off = (partials(mode, **parameters) for mode in ("every", "stable", "off"))
    assert off[:-1] == [""] * (len(off) - 1)
    assert every[-1] == stable[-1] == off[-1] != ""
    assert all(every[-1].startswith(text) for text in stable)
    assert all(b.startswith(a) for a, b in itertools.pairwise(stable))


@pytest.mark.parametrize("decoder", ["greedy", "prefix_beam"])
def test_a_text_that_is_put_together_piece_by_piece_is_the_text_of_all_tokens(
    decoder: str,
) -> None:
    engine = golden_engine()
    ask_one(engine, "a", flags="S", parameters={"decoder": decoder})
    (stream,) = engine.streams
    for seed in range(15):
        result = ask_one(engine, "a", noise(seed, seconds=1.3))
        (whole,) = engine.store.decoders.best([stream.slot])
        tokenizer = engine.parts.results._tokenizer
        assert result.text == tokenizer.decode(whole.tokens)
    assert stream.settled.num_tokens > 0.5 * len(whole.tokens)


@pytest.mark.numerics
def test_streams_of_different_decoders_share_steps_and_disturb_nobody() -> None:
    options: list[dict[str, Any]] = [
        {}, BEAM, {**BEAM, "beam_size": 3}, {"word_times": True}, EVERYTHING, BEAM,
    ]  # fmt: skip
    engine = golden_engine()
    audio = [noise(seed, seconds=1 + 0.3 * seed) for seed in range(len(options))]
    together = ask(
        engine,
        *(
            chunk(i, audio[i], flags="SE", parameters=p, wants_result=True)
            for i, p in enumerate(options)
        ),
    )
    assert len(engine.store.decoders.kinds) == 3
    for i, parameters in enumerate(options):
        alone = told(golden_engine(), audio[i], **parameters)
        assert_same_results(check_document(together[i].document), alone)
    assert_all_is_free(engine)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"nbest": 2}, ["nbest=2", "decoder=prefix_beam"]),
        ({"decoder": "beam"}, ["'beam'", "greedy, prefix_beam"]),
        ({"use_lm": True}, ["use_lm=True", "decoder=prefix_beam"]),
        ({**BEAM, "beam_size": 65}, ["beam_size=65", "0 .. 64"]),
        ({"language": "de"}, ["language='de'", "leave language out"]),
        ({"partials": "some"}, ["'some'", "off, stable, every"]),
        ({"endpoint_silence_s": 0}, ["endpoint_silence_s=0", "0.1 .. 60"]),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_before_anything_is_taken(
    parameters: dict[str, Any], words: list[str]
) -> None:
    engine = golden_engine()
    error_of(ask_one(engine, "a", noise(1), flags="S", parameters=parameters), *words)
    assert_all_is_free(engine)
    assert engine.store.decoders.kinds == []


def test_a_named_language_is_taken() -> None:
    engine = golden_engine(language="en")
    assert told(engine, noise(1), language="en")["text"] == text_alone(noise(1))
    error_of(ask_one(engine, "a", flags="S", parameters={"language": "de"}), "'de'", "'en'")


def test_a_stream_without_a_word_has_an_empty_document() -> None:
    document = told(golden_engine(), np.zeros(0, np.float32), **EVERYTHING)
    assert document["words"] == document["tokens"] == document["segments"] == []
    assert document["nbest"] == [{"text": "", "score": 0.0, "tokens": []}]


@pytest.mark.parametrize("decoder", ["greedy", "prefix_beam"])
def test_segments_cut_anywhere_spell_the_text_and_never_overlap(
    decoder: str, clips: list[Clip]
) -> None:
    """A tenth of a second is a pause inside many words, and half a second one of any sentence."""
    engine = load_engine(DEMO_DIR, ServingConfig(), device="cpu")
    rules = {"endpoint": True, "endpoint_silence_s": 0.1, "endpoint_max_s": 0.5}
    segments: list[dict[str, Any]] = []
    for clip in clips[:4]:
        samples_S, _ = soundfile.read(clip.path, dtype="float32")
        pieces = np.array_split(samples_S, 7)
        for number, piece in enumerate(pieces):
            request = chunk(
                "a",
                piece,
                flags="S" if number == 0 else "E" if number == 6 else "",
                parameters={"decoder": decoder, **rules} if number == 0 else None,
                wants_result=True,
            )
            document = check_document(engine.process([request])[0].document)
        segments += document["segments"]
    assert any("joins_previous" in segment for segment in segments)
    assert "silence" in {segment["reason"] for segment in segments}


def test_the_open_segment_and_nbest_are_told_under_every_only() -> None:
    engine, samples = golden_engine(), noise(1, seconds=4)
    for mode, is_told in (("every", True), ("stable", False), ("off", False)):
        options = {**BEAM, "nbest": 3, "endpoint": True, "endpoint_silence_s": 60, "partials": mode}
        begun = ask_one(
            engine, mode, samples, flags="S", parameters=options, wants_result=True
        ).document
        document = check_document(begun)
        assert bool(document["segments"]) == is_told
        assert ("nbest" in document) == is_told
        ended = check_document(ask_one(engine, mode, flags="E", wants_result=True).document)
        assert ended["nbest"]
        assert ended["segments"]
