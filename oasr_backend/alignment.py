"""Seconds and confidence of tokens and words, from the alignment behind a hypothesis.

A CTC model gives a token to the first frame of the decoded path that holds it, and to nothing after
it: what follows is blank. So a token starts with that frame, and ends where the next one starts,
`MOST_TOKEN_FRAMES` later, or with the audio, whichever comes first. The confidence is
exp(mean(log-prob)) over the tokens concerned, each taken at its best frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oasr_backend.tokenizer import Tokenizer
from oasr_backend.types import Hypothesis

#: A token is taken to last no longer; with 40 ms frames 0.2 s.
MOST_TOKEN_FRAMES = 5


@dataclass(frozen=True)
class Timing:
    """How frames become seconds: those past `audio_s` are silence that pads the end."""

    frame_s: float
    audio_s: float

    def start_s(self, frame: int) -> float:
        return min(frame * self.frame_s, self.audio_s)

    def end_s(self, frame: int, next_frame: int | None) -> float:
        last = frame + MOST_TOKEN_FRAMES
        return self.start_s(last if next_frame is None else min(last, next_frame))

    def spans(self, frames: Sequence[int]) -> list[tuple[float, float]]:
        """(start, end) seconds of tokens that appear in these frames."""
        following = [*frames[1:], None]
        return [
            (self.start_s(frame), self.end_s(frame, later))
            for frame, later in zip(frames, following, strict=False)
        ]


def confidence(log_probs: Sequence[float]) -> float:
    """In 0..1; 1 for nothing, which is certain to be nothing."""
    if not log_probs:
        return 1.0
    return min(1.0, math.exp(sum(log_probs) / len(log_probs)))


def token_entries(
    hypothesis: Hypothesis, tokenizer: Tokenizer, timing: Timing
) -> list[dict[str, Any]]:
    columns = zip(
        hypothesis.tokens,
        tokenizer.pieces(hypothesis.tokens),
        timing.spans(hypothesis.times),
        hypothesis.token_log_probs,
        strict=True,
    )
    return [
        {
            "id": token_id,
            "token": symbol,
            "start_s": round(start_s, 3),
            "end_s": round(end_s, 3),
            "confidence": round(confidence((log_prob,)), 4),
        }
        for token_id, symbol, (start_s, end_s), log_prob in columns
    ]


def word_entries(
    hypothesis: Hypothesis, tokenizer: Tokenizer, timing: Timing
) -> list[dict[str, Any]]:
    spans, log_probs = timing.spans(hypothesis.times), hypothesis.token_log_probs
    return [
        {
            "word": word.text,
            "start_s": round(spans[word.first_token][0], 3),
            "end_s": round(spans[word.last_token][1], 3),
            "confidence": round(confidence(log_probs[word.first_token : word.last_token + 1]), 4),
        }
        for word in tokenizer.words(hypothesis.tokens)
    ]
