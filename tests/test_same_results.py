"""The rule about results says yes to the seventh digit, and no to everything else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from oasr_backend.decoders.result import GpuDecoderResult
from oasr_backend.types import Hypothesis
from tests.same_results import assert_same_results

DOCUMENT: dict[str, Any] = {
    "text": "A B",
    "num_frames": 20,
    "step_ms": 1.5,
    "tokens": [{"id": 3, "token": "A", "start_s": 0.04, "end_s": 0.08, "confidence": 0.9}],
    "nbest": [
        {"text": "A B", "score": -1.0, "tokens": [3, 4]},
        {"text": "A", "score": -2.5, "tokens": [3]},
    ],
}


def changed(*path: Any, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("step_ms",), 99.0),
        (("nbest", 0, "score"), -1.00009),
        (("tokens", 0, "confidence"), 0.9001),
        (("tokens", 0, "confidence"), 0.8999),
    ],
)
def test_scores_and_confidences_may_differ_by_the_tolerance(path: Any, value: float) -> None:
    assert_same_results(changed(*path, value=value), DOCUMENT)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("text",), "A C", "text: 'A C'"),
        (("num_frames",), 20.00001, "num_frames"),
        (("tokens", 0, "id"), 4, "tokens.0.id"),
        (("tokens", 0, "start_s"), 0.04001, "tokens.0.start_s"),
        (("tokens", 0, "confidence"), 0.9002, "tokens.0.confidence"),
        (("nbest", 1, "score"), -2.5002, "nbest.1.score"),
        (("nbest", 1, "score"), float("nan"), "nbest.1.score"),
        (("nbest",), DOCUMENT["nbest"][::-1], "nbest.0.text"),
        (("nbest",), DOCUMENT["nbest"][:1], "nbest: has"),
        (("rescored",), True, "the result: has"),
    ],
)
def test_whatever_else_differs_is_named(path: Any, value: Any, named: str) -> None:
    with pytest.raises(AssertionError, match=named):
        assert_same_results(changed(*path, value=value), DOCUMENT)


def test_hypotheses_and_decoder_results_follow_the_same_rule() -> None:
    one, near = Hypothesis((1, 2), -3.0, (4, 5), (-0.5, -0.25)), -3.00005
    assert_same_results([one._replace(score=near)], [one])
    with pytest.raises(AssertionError, match=r"0\.times\.1"):
        assert_same_results([one._replace(times=(4, 6))], [one])
    result = GpuDecoderResult.from_hypotheses([[one]])
    assert_same_results(GpuDecoderResult.from_hypotheses([[one._replace(score=near)]]), result)
    other = GpuDecoderResult.from_hypotheses([[one._replace(tokens=(1, 3))]])
    with pytest.raises(AssertionError, match=r"tokens\.0\.0"):
        assert_same_results(other, result)


def test_a_smaller_tolerance_may_be_asked_for() -> None:
    with pytest.raises(AssertionError, match=r"score: -1\.00009"):
        assert_same_results(changed("nbest", 0, "score", value=-1.00009), DOCUMENT, tolerance=1e-9)
