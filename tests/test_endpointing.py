"""Segments end where the rules say, for made-up frames and for real speech with a pause."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from oasr_backend.config import ServingConfig
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.text.endpointing import EndpointRules, Segmenter
from oasr_backend.types import AudioChunk, Hypothesis, Samples
from tests.conftest import DEMO_DIR, Clip
from tests.result_schema import check_document

RULES = EndpointRules(silence_frames=20, start_silence_frames=125, most_frames=250)


def starts_word(token: int) -> bool:
    return token % 2 == 0


def borders(
    frames: list[int],
    num_frames: int,
    *,
    looks: list[int] | None = None,
    tokens: list[int] | None = None,
) -> list[tuple[int, int, str]]:
    """(first, stop, reason) of the closed segments, after looks at some lengths and the whole."""
    tokens = tokens or [2] * len(frames)
    segmenter = Segmenter(RULES, starts_word)
    for heard in [*(looks or []), num_frames]:
        known = sum(frame < heard for frame in frames)
        skip = segmenter.num_closed_tokens
        rest = Hypothesis(tuple(tokens[skip:known]), 0.0, tuple(frames[skip:known]))
        segmenter.update(rest, heard)
    return [(segment.first, segment.stop, segment.reason) for segment in segmenter.closed]


def test_a_pause_between_tokens_is_one_border() -> None:
    assert borders([5, 10, 60, 70], 75) == [(0, 2, "silence")]
    assert borders([5, 10, 31, 70], 75) == [(0, 2, "silence"), (2, 3, "silence")]
    assert borders([5, 10, 30, 50], 55) == [], "one frame short of the silence"


def test_silence_after_the_last_token_closes_once() -> None:
    assert borders([5], 25) == []
    assert borders([5], 26) == [(0, 1, "silence")]
    assert borders([5], 100, looks=[26, 30, 60]) == [(0, 1, "silence")]


def test_a_long_silence_before_speech_is_one_empty_segment() -> None:
    assert borders([], 124) == []
    assert borders([], 5000, looks=[125, 400]) == [(0, 0, "no_speech")]
    assert borders([600], 610) == [(0, 0, "no_speech")]
    assert borders([3, 600], 610) == [(0, 1, "silence"), (1, 1, "no_speech")]


def test_a_long_segment_ends_where_a_word_starts() -> None:
    frames = list(range(0, 600, 10))
    assert borders(frames, 600) == [(0, 25, "length"), (25, 50, "length")]
    tokens = [2] * 25 + [3, 3] + [2] * 33
    assert borders(frames, 600, tokens=tokens)[0] == (0, 27, "length")


@given(
    gaps=st.lists(st.integers(1, 160), max_size=30),
    tail=st.integers(1, 200),
    looks=st.lists(st.integers(0, 3000), max_size=8),
)
def test_when_one_looks_changes_no_border(gaps: list[int], tail: int, looks: list[int]) -> None:
    frames = np.cumsum(gaps).tolist()
    num_frames = (frames[-1] if frames else 0) + tail
    looks = sorted(min(look, num_frames) for look in looks)
    assert borders(frames, num_frames, looks=looks) == borders(frames, num_frames)


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    return load_engine(DEMO_DIR, ServingConfig(), device="cpu")


def transcribe(
    engine: Engine, samples_S: Samples, *, piece: int, **parameters: Any
) -> list[dict[str, Any]]:
    documents = []
    starts = range(0, samples_S.size, piece)
    for start in starts:
        (result,) = engine.process([
            AudioChunk(
                "a",
                samples_S[start : start + piece],
                is_first=start == 0,
                is_last=start == starts[-1],
                options=StreamOptions(**parameters) if start == 0 else None,
                wants_result=True,
            )
        ])  # fmt: skip
        documents.append(check_document(result.document))
    return documents


def with_pause(clips: list[Clip], *, seconds: float) -> Samples:
    first_S, second_S = (soundfile.read(clip.path, dtype="float32")[0] for clip in clips[:2])
    pause_S = np.zeros(round(16000 * seconds), np.float32)
    return np.concatenate([first_S, pause_S, second_S])


@pytest.mark.parametrize("decoder", ["greedy", "prefix_beam"])
@pytest.mark.parametrize("piece", [5000, 10240, 10**6])
def test_two_seconds_of_silence_are_one_border_and_lose_no_word(
    engine: Engine, clips: list[Clip], decoder: str, piece: int
) -> None:
    samples_S = with_pause(clips, seconds=2.0)
    plain = transcribe(engine, samples_S, piece=10**6, decoder=decoder)[-1]
    documents = transcribe(engine, samples_S, piece=piece, decoder=decoder, endpoint=True)
    segments = documents[-1]["segments"]
    assert len(segments) == 2
    assert " ".join(segment["text"] for segment in segments) == plain["text"]
    assert [segment["reason"] for segment in segments] == ["silence", "end"]
    assert segments[1]["start_s"] - segments[0]["end_s"] > 1.5
    for document in documents:
        told = [segment for segment in document["segments"] if segment["is_final"]]
        assert told == segments[: len(told)], "what is closed stays"


def test_the_same_word_on_both_sides_of_a_border_is_there_twice(
    engine: Engine, clips: list[Clip]
) -> None:
    samples_S = with_pause([clips[0], clips[0]], seconds=2.0)
    document = transcribe(engine, samples_S, piece=4000, endpoint=True, word_times=True)[-1]
    first, second = (segment["text"].split() for segment in document["segments"])
    assert (first[0], first[-1]) == (second[0], second[-1])
    last_of_first = [
        t for t in document["tokens"] if t["end_s"] <= document["segments"][0]["end_s"]
    ]
    assert len(last_of_first) * 2 == pytest.approx(len(document["tokens"]), abs=3)


def test_a_minute_of_silence_is_one_empty_segment(engine: Engine) -> None:
    (document,) = transcribe(engine, np.zeros(16000 * 60, np.float32), piece=10**7, endpoint=True)
    (segment,) = document["segments"]
    assert (segment["text"], segment["reason"]) == ("", "no_speech")
    assert (segment["start_s"], segment["end_s"]) == (0.0, 5.0)
