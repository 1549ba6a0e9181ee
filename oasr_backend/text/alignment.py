"""Seconds and confidence of tokens and words, from the alignment behind a hypothesis.

A CTC model gives a token to the first frame of the decoded path that holds it, and to nothing after
it: what follows is blank. So a token starts with that frame, and ends where the next one starts,
`MOST_TOKEN_FRAMES` later, or with the audio, whichever comes first. The confidence is
exp(mean(log-prob)) over the tokens concerned, each taken at its best frame.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oasr_backend.text.tokenizer import Tokenizer
from oasr_backend.text.unit_text import Word
from oasr_backend.types import Hypothesis

#: A token is taken to last no longer; with 40 ms frames 0.2 s.
MOST_TOKEN_FRAMES = 5


@dataclass(frozen=True)
class Timing:
    """How frames become seconds, in whole milliseconds.

    Frames past `audio_s` are silence that pads the end. A token that appears there is moved into
    the audio: the last tokens have at least a frame each, or equal shares of audio that is too
    short for that, or a millisecond.
    """

    frame_s: float
    audio_s: float

    def start_s(self, frame: int) -> float:
        return min(self._frame_ms(frame), self._audio_ms) / 1000

    def spans(self, frames: Sequence[int]) -> list[tuple[float, float]]:
        """(start, end) seconds of all tokens of a hypothesis, which appear in these frames.

        Each ends after its start and no later than the next one starts.
        """
        if not frames:
            return []
        starts_ms = self._starts_ms(frames)
        most_ms, last_ms = self._frame_ms(MOST_TOKEN_FRAMES), max(self._audio_ms, len(frames))
        ends_ms = [
            min(start_ms + most_ms, later_ms)
            for start_ms, later_ms in zip(starts_ms, [*starts_ms[1:], last_ms], strict=True)
        ]
        return [(start / 1000, end / 1000) for start, end in zip(starts_ms, ends_ms, strict=True)]

    def _starts_ms(self, frames: Sequence[int]) -> list[int]:
        num_tokens, audio_ms = len(frames), self._audio_ms
        share_ms = max(1, min(self._frame_ms(1), audio_ms // max(1, num_tokens)))
        return [
            max(index, min(self._frame_ms(frame), audio_ms - (num_tokens - index) * share_ms))
            for index, frame in enumerate(frames)
        ]

    @property
    def _audio_ms(self) -> int:
        return round(self.audio_s * 1000)

    def _frame_ms(self, frame: int) -> int:
        return round(frame * self.frame_s * 1000)


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
            "start_s": start_s,
            "end_s": end_s,
            "confidence": round(confidence((log_prob,)), 4),
        }
        for token_id, symbol, (start_s, end_s), log_prob in columns
    ]


def word_entries(
    words: Sequence[Word], hypothesis: Hypothesis, timing: Timing
) -> list[dict[str, Any]]:
    """`words` are those that the tokenizer makes of the hypothesis' tokens."""
    log_probs = hypothesis.token_log_probs
    return [
        {
            "word": word.text,
            "start_s": start_s,
            "end_s": end_s,
            "confidence": round(confidence(log_probs[word.first_token : word.last_token + 1]), 4),
        }
        for word, (start_s, end_s) in zip(
            words, _word_spans(words, timing.spans(hypothesis.times)), strict=True
        )
    ]


def _word_spans(
    words: Sequence[Word], spans: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """(start, end) of each word; words of one token have equal shares of it."""
    num_words = Counter(token for word in words for token in {word.first_token, word.last_token})
    num_before: Counter[int] = Counter()
    for word in words:
        first, last = word.first_token, word.last_token
        start_s = _inside(spans[first], num_before[first] / num_words[first])
        num_before.update({first, last})
        yield start_s, _inside(spans[last], num_before[last] / num_words[last])


def _inside(span: tuple[float, float], part: float) -> float:
    start_s, end_s = span
    return round(start_s + part * (end_s - start_s), 3)
