"""Times of tokens and words: arithmetic on a few frames, then against a forced alignment."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from oasr_backend.alignment import MOST_TOKEN_FRAMES, Timing, confidence
from oasr_backend.checkpoints import load_wenet
from oasr_backend.config import ServingConfig
from oasr_backend.engine import Engine
from oasr_backend.types import AudioChunk
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


def test_no_time_lies_behind_the_audio() -> None:
    timing = Timing(frame_s=FRAME_S, audio_s=1.0)
    assert timing.spans([24, 30]) == [(pytest.approx(0.96), 1.0), (1.0, 1.0)]


def test_confidence_is_the_geometric_mean_of_probabilities() -> None:
    assert confidence([math.log(0.9), math.log(0.4)]) == pytest.approx(0.6)
    assert confidence([]) == 1.0
    assert confidence([1e-7]) == 1.0


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    return Engine.load(DEMO_DIR, ServingConfig(), device="cpu")


class Recorded:
    """One clip through the engine, with the log-probs that its decoder saw."""

    def __init__(self, engine: Engine, clip: Clip, **parameters: Any) -> None:
        scores: list[torch.Tensor] = []
        handle = engine.model.get_submodule("ctc").register_forward_hook(
            lambda _module, _inputs, logits_BTV: scores.append(logits_BTV[0].clone())
        )
        samples_S = soundfile.read(clip.path, dtype="float32")[0]
        chunk = AudioChunk(
            "a",
            samples_S,
            is_first=True,
            is_last=True,
            parameters={"word_times": True, **parameters},
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
    tokenizer = load_wenet(DEMO_DIR).tokenizer
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
