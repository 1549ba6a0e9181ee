"""Times of tokens and words, by arithmetic on a few frames and against a forced alignment."""

from __future__ import annotations

import itertools
import math
from statistics import median
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.text.alignment import MOST_TOKEN_FRAMES, Timing, confidence, word_entries
from oasr_backend.text.tokenizer import UnitTokenizer
from oasr_backend.types import AudioChunk, Hypothesis
from tests.conftest import DEMO_DIR, Clip
from tests.reference.forced_alignment import first_frames
from tests.result_schema import check_document

FRAME_S = 0.04


def test_a_token_lasts_until_the_next_one_and_never_long() -> None:
    timing = Timing(frame_s=FRAME_S, audio_s=10.0)
    spans = timing.spans([10, 12, 100])
    assert spans[0] == pytest.approx((0.40, 0.48))
    assert spans[1] == pytest.approx((0.48, 0.48 + MOST_TOKEN_FRAMES * FRAME_S))
    assert spans[2] == pytest.approx((4.0, 4.0 + MOST_TOKEN_FRAMES * FRAME_S))


def test_tokens_heard_in_the_padding_share_the_end_of_the_audio() -> None:
    timing = Timing(frame_s=FRAME_S, audio_s=1.0)
    assert timing.spans([24]) == [(0.96, 1.0)]
    assert timing.spans([24, 30]) == [(0.92, 0.96), (0.96, 1.0)]
    assert timing.spans([10, 26, 27]) == [(0.4, 0.6), (0.92, 0.96), (0.96, 1.0)]
    assert Timing(frame_s=FRAME_S, audio_s=0.01).spans([0, 3]) == [(0.0, 0.005), (0.005, 0.01)]


@given(
    gaps=st.lists(st.integers(1, 9), max_size=30),
    audio_s=st.floats(0, 8),
    frame_s=st.sampled_from([0.04, 0.06, 0.08, 0.0375]),
)
def test_every_token_has_a_length_and_none_reaches_into_the_next(
    gaps: list[int], audio_s: float, frame_s: float
) -> None:
    frames = np.cumsum(gaps).tolist()
    spans = Timing(frame_s=frame_s, audio_s=audio_s).spans(frames)
    assert all(0.0 <= start_s < end_s for start_s, end_s in spans)
    assert all(end_s <= later_s for (_, end_s), (later_s, _) in itertools.pairwise(spans))
    last_s = max(round(audio_s, 3), len(frames) / 1000)
    assert all(end_s <= last_s for _, end_s in spans)


def test_words_of_one_token_share_its_time() -> None:
    tokenizer = UnitTokenizer(["<blank>", "\u2581of\u2581the", "m", "\u2581a\u2581b\u2581c"])
    hypothesis = Hypothesis((1, 2, 3), 0.0, (10, 14, 20), (-0.1,) * 3)
    timing = Timing(frame_s=FRAME_S, audio_s=10.0)
    entries = word_entries(tokenizer.words(hypothesis.tokens), hypothesis, timing)
    assert [(e["word"], e["start_s"], e["end_s"]) for e in entries] == [
        ("of", 0.4, 0.48), ("them", 0.48, 0.76), ("a", 0.8, 0.867), ("b", 0.867, 0.933),
        ("c", 0.933, 1.0),
    ]  # fmt: skip


def test_confidence_is_the_geometric_mean_of_probabilities() -> None:
    assert confidence([math.log(0.9), math.log(0.4)]) == pytest.approx(0.6)
    assert confidence([]) == 1.0
    assert confidence([1e-7]) == 1.0


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    return load_engine(DEMO_DIR, ServingConfig(), device="cpu")


class Recorded:
    """One clip through the engine, with the log-probs that its decoder saw."""

    def __init__(self, engine: Engine, clip: Clip, **parameters: Any) -> None:
        scores: list[torch.Tensor] = []
        handle = engine.parts.model.get_submodule("heads.ctc").register_forward_hook(
            lambda _module, _inputs, logits_BTV: scores.append(logits_BTV[0].clone())
        )
        samples_S = soundfile.read(clip.path, dtype="float32")[0]
        chunk = AudioChunk(
            "a",
            samples_S,
            is_first=True,
            is_last=True,
            options=StreamOptions(word_times=True, **parameters),
            wants_result=True,
        )
        try:
            (result,) = engine.process([chunk])
        finally:
            handle.remove()
        assert result.error is None
        self.document = check_document(result.document)
        logits_TV = torch.cat(scores)[: self.document["num_frames"]]
        self.log_probs_TV = logits_TV.double().log_softmax(-1).numpy()


def word_start_errors(recorded: Recorded) -> list[float]:
    """Seconds between the told start of each word and that of the forced alignment."""
    document = recorded.document
    tokenizer = open_checkpoint(DEMO_DIR).load().tokenizer
    tokens = [token["id"] for token in document["tokens"]]
    frames = first_frames(recorded.log_probs_TV, tokens)
    return [
        abs(word["start_s"] - min(frames[aligned.first_token] * FRAME_S, document["audio_s"]))
        for word, aligned in zip(document["words"], tokenizer.words(tokens), strict=True)
    ]


@pytest.mark.parametrize("parameters", [{}, {"decoder": "prefix_beam"}])
def test_words_start_where_a_forced_alignment_puts_them(
    engine: Engine, clips: list[Clip], parameters: dict[str, Any]
) -> None:
    errors = [
        error for clip in clips for error in word_start_errors(Recorded(engine, clip, **parameters))
    ]
    assert len(errors) > 80
    assert median(errors) == 0.0
    assert np.percentile(errors, 95) <= FRAME_S + 1e-6


def test_a_word_that_breaks_off_has_a_length(engine: Engine, clips: list[Clip]) -> None:
    """The recording stops 0.44 s into a sentence, so that a word is decoded in the padding."""
    (clip,) = (clip for clip in clips if "LJ050-0011_bf_emma" in clip.path.name)
    samples_S = soundfile.read(clip.path, dtype="float32")[0]
    broken_off_S = np.concatenate([samples_S, np.zeros(16000, np.float32), samples_S[:7040]])
    chunk = AudioChunk(
        "a", broken_off_S, is_first=True, is_last=True,
        options=StreamOptions(word_times=True, endpoint=True), wants_result=True,
    )  # fmt: skip
    (result,) = engine.process([chunk])
    document = check_document(result.document)
    frames = [round(token["start_s"] / FRAME_S, 3) for token in document["tokens"]]
    assert any(not frame.is_integer() for frame in frames), "the cut moves no token"
    assert all(word["start_s"] < word["end_s"] for word in document["words"])
