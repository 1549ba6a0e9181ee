"""A stream is told the same alone and among others, with times and the order of its n-best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import soundfile

from oasr_backend.config import ServingConfig
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import Samples
from tests.conftest import DEMO_DIR, Clip
from tests.engine_helpers import ask, chunk, golden_engine, noise
from tests.result_schema import check_document
from tests.same_results import TOLERANCE, assert_same_results

pytestmark = pytest.mark.numerics

EVERYTHING = {"decoder": "prefix_beam", "nbest": 10, "word_times": True, "endpoint": True}
Documents = list[dict[str, Any]]


def told(engine: Engine, audio: Sequence[Samples], **parameters: Any) -> Documents:
    """The final documents of streams that arrive together, each in one request."""
    results = ask(engine, *(
        chunk(i, samples_S, flags="SE", parameters=parameters, wants_result=True)
        for i, samples_S in enumerate(audio)
    ))  # fmt: skip
    assert [result.error for result in results] == [None] * len(audio)
    return [check_document(result.document) for result in results]


def among_others(engine: Engine, audio: Sequence[Samples], **parameters: Any) -> Documents:
    """The stream runs beside nine that speak on, so that no step has the width of one alone."""
    others = [noise(200 + i, seconds=5 + i / 9) for i in range(9)]
    return told(engine, [*audio, *others], **parameters)[: len(audio)]


def alone(engine: Engine, audio: Sequence[Samples], **parameters: Any) -> Documents:
    return [told(engine, [samples_S], **parameters)[0] for samples_S in audio]


def smallest_gap(document: dict[str, Any]) -> float:
    """Between neighbours of the n-best."""
    return float(-np.diff([one["score"] for one in document["nbest"]]).max())


@pytest.mark.parametrize("lead_s", [0.5, 1.3])
def test_frames_of_digital_silence_are_no_ties_that_neighbours_decide(lead_s: float) -> None:
    """Silent frames are alike, so that alignments which differ in them score nearly the same."""
    silence_S = np.zeros(3 * 16000, np.float32)
    audio = [
        np.concatenate([noise(i, seconds=lead_s), silence_S, noise(50 + i, seconds=0.7)])
        for i in range(3)
    ]
    engine = golden_engine(max_streams=16)
    expected = alone(engine, audio, **EVERYTHING)
    assert all(document["words"] for document in expected)
    assert_same_results(among_others(engine, audio, **EVERYTHING), expected)


def test_recordings_are_told_the_same_alone_and_among_others(clips: list[Clip]) -> None:
    engine = load_engine(DEMO_DIR, ServingConfig.of(max_streams=16), device="cpu")
    audio = [soundfile.read(clip.path, dtype="float32")[0] for clip in clips[:4]]
    expected = alone(engine, audio, **EVERYTHING, rescoring=True)
    assert all(document["rescored"] for document in expected)
    assert min(map(smallest_gap, expected)) > 2 * TOLERANCE, "no order hangs on a rounding"
    assert_same_results(among_others(engine, audio, **EVERYTHING, rescoring=True), expected)
