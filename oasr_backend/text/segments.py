"""The segments of one stream as its RESULT document tells them: text, times and confidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from oasr_backend.text.alignment import Timing, confidence
from oasr_backend.text.endpointing import EndpointRules, Segment, Segmenter
from oasr_backend.text.tokenizer import Tokenizer
from oasr_backend.text.unit_text import START, Joint
from oasr_backend.types import Hypothesis


class Heard(NamedTuple):
    """How far a stream has come; `num_frames` is without the silence that pads the end."""

    timing: Timing
    num_frames: int
    finish_reason: str | None


class _Rest(NamedTuple):
    """The tokens from `first` on, and the (start, end) seconds of each."""

    first: int
    hypothesis: Hypothesis
    spans_s: list[tuple[float, float]]

    def own(self, segment: Segment) -> slice:
        return slice(segment.first - self.first, segment.stop - self.first)


@dataclass
class Segments:
    """Closed segments stay as they were told; what is told of the open one may still change.

    Those that are left out are not held any more.
    """

    rules: EndpointRules
    tokenizer: Tokenizer
    _closed: list[dict[str, Any]] = field(default_factory=list)
    # Where the text of the open segment goes on.
    _joint: Joint = START

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer
        self._segmenter = Segmenter(
            self.rules, tokenizer.starts_word, tokenizer.may_part, tokenizer.awaits_next
        )

    @property
    def num_closed_tokens(self) -> int:
        return self._segmenter.num_closed_tokens

    def told(self, tokens: Hypothesis, heard: Heard, *, tells_open: bool) -> list[dict[str, Any]]:
        """All segments in order, after closing what has ended.

        `tokens` are those behind the first `num_closed_tokens`.
        """
        rest = _Rest(self.num_closed_tokens, tokens, heard.timing.spans(tokens.times))
        for segment in self._segmenter.update(tokens, heard.num_frames):
            entry, self._joint = self._entry(segment, rest, heard)
            self._closed.append(entry)
        still_open = Segment(self.num_closed_tokens, rest.first + len(tokens.tokens), "")
        if not tells_open or still_open.first == still_open.stop:
            return list(self._closed)
        return [*self._closed, self._entry(still_open, rest, heard)[0]]

    def leave_out(self, *, before_s: float) -> int:
        """Forgets closed ones that ended before, all of them told by now; returns how many."""
        num_old: int = sum(entry["end_s"] < before_s for entry in self._closed)
        del self._closed[:num_old]
        return num_old

    def _entry(self, segment: Segment, rest: _Rest, heard: Heard) -> tuple[dict[str, Any], Joint]:
        """The segment that follows `_joint`, and where the next one goes on."""
        own = rest.own(segment)
        text, joint = self.tokenizer.joined(rest.hypothesis.tokens[own], self._joint)
        start_s, end_s = _times_s(segment, rest, heard)
        entry = {
            "text": text.removeprefix(" "),
            "start_s": start_s,
            "end_s": end_s,
            "confidence": round(confidence(rest.hypothesis.token_log_probs[own]), 4),
            "is_final": bool(segment.reason or heard.finish_reason),
            "reason": segment.reason or heard.finish_reason,
        }
        if text and self._joint.tail and not text.startswith(" "):
            entry["joins_previous"] = True
        return entry, joint


def _times_s(segment: Segment, rest: _Rest, heard: Heard) -> tuple[float, float]:
    own = rest.own(segment)
    if own.start == own.stop:
        begin, end = segment.silent_frames
        return heard.timing.start_s(begin), heard.timing.start_s(end)
    start_s, end_s = rest.spans_s[own.start][0], rest.spans_s[own.stop - 1][1]
    if segment.reason and own.stop == len(rest.spans_s):
        end_s = min(end_s, heard.timing.start_s(heard.num_frames))
    return start_s, end_s
