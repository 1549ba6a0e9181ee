"""Rescoring in the engine: the answers of a stream that asks for it, and the others' cost."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.decoders.second_pass.rescorer import Rescorer
from oasr_backend.errors import ConfigError
from oasr_backend.streaming.assemble import assemble
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import ChunkResult, Samples
from tests.decoder_checkpoint import reference, write_checkpoint
from tests.engine_helpers import (
    STRIDE_SAMPLES,
    WINDOW_SAMPLES,
    ManualClock,
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

BEAM: dict[str, Any] = {"decoder": "prefix_beam", "nbest": 10}
RESCORED: dict[str, Any] = {**BEAM, "rescoring": True}
EVERYTHING: dict[str, Any] = {**RESCORED, "word_times": True, "endpoint": True}
CTC_WEIGHT = 0.5
CLIPS = [noise(seed, seconds=0.9 + 0.3 * seed) for seed in range(4)]

NewEngine = Callable[..., Engine]


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bi") / "checkpoint")


@pytest.fixture(name="new_engine")
def _new_engine(directory: Path) -> NewEngine:
    return functools.partial(engine_of, directory)


def engine_of(directory: Path, **settings: Any) -> Engine:
    clock = settings.pop("clock", ManualClock())
    config = ServingConfig.of(**{"max_streams": 8, **settings})
    checkpoint = open_checkpoint(directory).load()
    return assemble(checkpoint, config, device=torch.device("cpu"), clock=clock)


def told(engine: Engine, samples_S: Samples, **parameters: Any) -> dict[str, Any]:
    return document_of(
        ask_one(engine, "a", samples_S, flags="SE", parameters=parameters, wants_result=True)
    )


def document_of(result: ChunkResult) -> dict[str, Any]:
    assert result.error is None
    document = check_document(result.document)
    assert document["text"] == result.text
    return document


def without_time(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "step_ms": 0}


def rescorer_of(engine: Engine) -> Rescorer:
    rescorer = engine.store.decoders._final_order._second_pass
    assert isinstance(rescorer, Rescorer)
    return rescorer


@contextmanager
def failing_decoder(engine: Engine, error: Exception) -> Iterator[None]:
    def fault(_module: torch.nn.Module, _inputs: tuple[Any, ...]) -> None:
        raise error

    hook = rescorer_of(engine)._decoder.left.register_forward_pre_hook(fault)
    try:
        yield
    finally:
        hook.remove()


def encoder_output(engine: Engine, samples_S: Samples) -> Tensor:
    """(T, D) frames of one stream, as they go into the CTC head."""
    heard: list[Tensor] = []
    hook = engine.parts.model.heads["ctc"].register_forward_pre_hook(
        lambda _, inputs: heard.append(inputs[0][0].clone())
    )
    document = told(engine, samples_S, **BEAM)
    hook.remove()
    return torch.cat(heard)[: document["num_frames"]]


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["transformer", "bitransformer"])
def test_the_text_is_what_the_oracle_chooses_of_the_beams_hypotheses(
    kind: str, tmp_path: Path
) -> None:
    engine = engine_of(write_checkpoint(tmp_path / kind, kind))
    oracle, changed = reference(kind), 0
    for samples_S in CLIPS[:2]:
        first = told(engine, samples_S, **BEAM)
        encoded_TD = encoder_output(engine, samples_S)
        pairs = [(entry["tokens"], entry["score"]) for entry in first["nbest"]]
        scores = oracle.combined(pairs, encoded_TD, ctc_weight=CTC_WEIGHT)
        expected = sorted(zip(scores, first["nbest"], strict=True), key=lambda pair: -pair[0])
        second = told(engine, samples_S, **RESCORED)
        assert second["rescored"] is True
        assert_same_results(second["nbest"], [{**one, "score": score} for score, one in expected])
        assert second["text"] == expected[0][1]["text"]
        changed += second["text"] != first["text"]
    assert changed, "the decoder never disagreed with the beam: this test shows nothing"


def test_every_field_follows_the_new_order(new_engine: NewEngine) -> None:
    engine, changed = new_engine(), 0
    for samples_S in CLIPS[:2]:
        document = told(engine, samples_S, **EVERYTHING)
        best = document["nbest"][0]
        assert document["text"] == best["text"] == " ".join(w["word"] for w in document["words"])
        assert [token["id"] for token in document["tokens"]] == best["tokens"]
        spoken = [segment["text"] for segment in document["segments"] if segment["text"]]
        assert " ".join(spoken) == best["text"]
        changed += document["text"] != told(engine, samples_S, **BEAM)["text"]
    assert changed
    assert_all_is_free(engine)


def test_partial_answers_are_those_of_the_beam(new_engine: NewEngine) -> None:
    plain, rescored = new_engine(), new_engine()
    for start in range(0, CLIPS[3].size, 8000):
        flags = ("S" if start == 0 else "") + ("E" if start + 8000 >= CLIPS[3].size else "")
        answers = []
        for engine, options in ((plain, BEAM), (rescored, RESCORED)):
            parameters = options if start == 0 else {}
            piece_S = CLIPS[3][start : start + 8000]
            result = ask_one(
                engine, "a", piece_S, flags=flags, parameters=parameters, wants_result=True
            )
            answers.append(without_time(document_of(result)))
        assert answers[1].pop("rescored") == ("E" in flags)
        assert ("E" in flags) or answers[0] == answers[1]


@pytest.mark.numerics
def test_any_cut_of_the_audio_gives_the_same_document(new_engine: NewEngine) -> None:
    samples_S, engine, piece = CLIPS[2], new_engine(), 3_333
    for start in range(0, samples_S.size, piece):
        last = start + piece >= samples_S.size
        result = ask_one(
            engine, "cut", samples_S[start : start + piece],
            flags=("S" if start == 0 else "") + ("E" if last else ""),
            parameters=EVERYTHING if start == 0 else {}, wants_result=True,
        )  # fmt: skip
    assert_same_results(document_of(result), told(engine, samples_S, **EVERYTHING))


@pytest.mark.numerics
def test_streams_that_end_together_are_rescored_in_one_pass_and_as_if_alone(
    new_engine: NewEngine,
) -> None:
    engine = new_engine()
    passes: list[int] = []
    hook = rescorer_of(engine)._decoder.left.register_forward_pre_hook(
        lambda _, inputs: passes.append(len(inputs[0]))
    )
    # Whole windows, so that all of them take their last step together.
    clips = [noise(seed)[:STRIDE_SAMPLES] for seed in range(4)]
    results = ask(
        engine,
        *(
            chunk(i, samples_S, flags="SE", parameters=RESCORED, wants_result=True)
            for i, samples_S in enumerate(clips)
        ),
    )
    hook.remove()
    assert passes == [4]
    for result, samples_S in zip(results, clips, strict=True):
        together, alone = document_of(result), told(engine, samples_S, **RESCORED)
        assert_same_results(together, alone)
        assert together["rescored"] is True
    assert_all_is_free(engine)


def test_a_request_is_answered_while_the_attention_decoder_runs(new_engine: NewEngine) -> None:
    engine = new_engine()
    answered: list[bool] = []

    def at_that_time(_module: torch.nn.Module, _inputs: tuple[Any, ...]) -> None:
        other = threading.Thread(target=lambda: engine.submit([chunk("b", flags="S")]))
        other.start()
        other.join(60)
        answered.append(not other.is_alive())

    hook = rescorer_of(engine)._decoder.left.register_forward_pre_hook(at_that_time)
    assert told(engine, CLIPS[0], **RESCORED)["rescored"] is True
    hook.remove()
    assert answered == [True]
    assert ask_one(engine, "b", CLIPS[1], flags="E").text == text_alone(CLIPS[1])


@pytest.mark.numerics
def test_who_does_not_ask_gets_the_very_same_answer_beside_those_who_do(
    new_engine: NewEngine,
) -> None:
    """Bit for bit, scores and confidences too: the steps of both engines are equally wide."""
    shared, plain = new_engine(), new_engine()
    documents = []
    for engine, options in ((shared, RESCORED), (plain, BEAM)):
        chunks = [
            chunk(i, samples_S, flags="SE", parameters=asked, wants_result=True)
            for i, (samples_S, asked) in enumerate(
                zip(CLIPS, (options, BEAM, options, {"word_times": True}), strict=True)
            )
        ]
        answers = [document_of(result) for result in ask(engine, *chunks)]
        documents.append([without_time(answers[i]) for i in (1, 3)])
        assert "rescored" not in answers[1]
    assert documents[0] == documents[1]
    assert rescorer_of(shared).frames.num_blocks > 0


def test_nothing_is_kept_while_no_stream_asks(new_engine: NewEngine) -> None:
    engine = new_engine()
    told(engine, CLIPS[0], **BEAM)
    told(engine, CLIPS[1])
    assert rescorer_of(engine).frames.num_blocks == 0


@pytest.mark.parametrize("way", ["replaced", "cancelled", "idle", "unload", "failed"])
def test_frames_come_back_however_a_stream_ends(new_engine: NewEngine, way: str) -> None:
    clock = ManualClock()
    engine = new_engine(clock=clock)
    ask_one(engine, "a", CLIPS[3], flags="S", parameters=RESCORED)
    frames = rescorer_of(engine).frames
    assert frames.num_free_blocks < frames.num_blocks
    if way == "replaced":
        ask_one(engine, "a", flags="SE")
    elif way == "cancelled":
        error_of(ask_one(engine, "a", CLIPS[0], is_cancelled=lambda: True), "cancelled")
    elif way == "idle":
        clock.now_s += 1000
        engine.close_idle()
    elif way == "failed":
        hook = engine.parts.model.heads["ctc"].register_forward_pre_hook(lambda *_: 1 / 0)
        assert ask_one(engine, "a", CLIPS[0]).error is not None
        hook.remove()
    else:
        engine.close()
    assert frames.num_free_blocks == frames.num_blocks
    assert len(frames) == 0
    assert_all_is_free(engine)


def test_a_stream_longer_than_is_kept_ends_with_the_beams_text(new_engine: NewEngine) -> None:
    engine = new_engine(rescoring_max_s=1.5)
    long_, short = noise(7, seconds=2), noise(7, seconds=0.5)
    first, second = told(engine, long_, **BEAM), told(engine, long_, **RESCORED)
    assert second.pop("rescored") is False
    assert_same_results(second, first)
    assert told(engine, short, **RESCORED)["rescored"] is True


@pytest.mark.numerics
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error: x")])
def test_when_rescoring_fails_every_stream_has_its_beams_text(
    new_engine: NewEngine, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine()
    with failing_decoder(engine, error):
        results = ask(
            engine,
            chunk(0, CLIPS[0], flags="SE", parameters=RESCORED, wants_result=True),
            chunk(1, CLIPS[1], flags="SE"),
            chunk(2, CLIPS[2], flags="S"),
        )
    failed = document_of(results[0])
    assert failed.pop("rescored") is False
    assert_same_results(failed, told(engine, CLIPS[0], **BEAM))
    assert results[1].text == text_alone(CLIPS[1])
    assert ask_one(engine, 2, flags="E").text == text_alone(CLIPS[2])
    assert "event=rescoring_failed" in caplog.text
    assert told(engine, CLIPS[0], **RESCORED)["rescored"] is True
    assert_all_is_free(engine)


def test_an_end_that_brings_no_window_rescores_what_was_heard(new_engine: NewEngine) -> None:
    engine = new_engine(tail_padding=False)
    samples_S = noise(2)[:WINDOW_SAMPLES]
    ask_one(engine, "a", samples_S, flags="S", parameters=RESCORED)
    (turn,) = engine.submit([chunk("a", flags="E", wants_result=True)])
    assert turn.result is not None, "it needs no step"
    document = document_of(turn.result)
    assert (document["rescored"], document["num_frames"]) == (True, 16)
    assert document["text"] == told(engine, samples_S, **RESCORED)["text"]
    assert_all_is_free(engine)


def test_a_stream_without_audio_has_nothing_to_rescore(new_engine: NewEngine) -> None:
    document = told(new_engine(), np.zeros(0, np.float32), **RESCORED)
    assert (document["text"], document["rescored"]) == ("", False)


def test_a_stream_that_ends_at_its_ceiling_is_rescored_too(new_engine: NewEngine) -> None:
    engine = new_engine(num_left_chunks=-1, max_blocks_per_seq=4, max_num_blocks=16)
    result = ask_one(
        engine, "a", noise(3, seconds=6), flags="S", parameters=RESCORED, wants_result=True
    )
    document = document_of(result)
    assert (document["finish_reason"], document["rescored"]) == ("length", True)


def test_a_server_may_rescore_by_default_and_a_stream_may_decline(new_engine: NewEngine) -> None:
    engine = new_engine(decoder="prefix_beam", rescoring=True)
    assert told(engine, CLIPS[0])["rescored"] is True
    assert "rescored" not in told(engine, CLIPS[0], rescoring=False)
    assert "rescored" not in told(engine, CLIPS[0], decoder="greedy")


def test_rescoring_needs_the_prefix_beam(new_engine: NewEngine) -> None:
    result = ask_one(new_engine(), "a", flags="S", parameters={"rescoring": True})
    error_of(result, "rescoring=True", "decoder=prefix_beam")


def test_a_checkpoint_without_a_decoder_refuses_by_name_and_takes_nothing() -> None:
    engine = golden_engine()
    result = ask_one(engine, "a", noise(1), flags="S", parameters=RESCORED)
    error_of(result, "rescoring:", "has no attention decoder", "leave rescoring out")
    assert_all_is_free(engine)
    with pytest.raises(ConfigError, match="no attention decoder"):
        golden_engine(decoder="prefix_beam", rescoring=True)


def test_a_checkpoint_whose_decoder_cannot_be_used_refuses_with_the_reason(tmp_path: Path) -> None:
    engine = engine_of(write_checkpoint(tmp_path / "checkpoint", normalize_before=False))
    assert told(engine, CLIPS[0])["text"] == text_alone(CLIPS[0])
    result = ask_one(engine, "a", flags="S", parameters=RESCORED)
    error_of(
        result, "rescoring:", "cannot be used", "normalize_before=False", "leave rescoring out"
    )
