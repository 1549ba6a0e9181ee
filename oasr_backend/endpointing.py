"""Segments of a stream: where silence, or length, ends one and the next one begins.

Nothing but the frames of the tokens decides, so that the borders do not depend on how the audio was
cut, and neither encoder nor decoder learns of them: no word is lost, and a token that is repeated
across a border stays two tokens, because blanks lie between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oasr_backend.stream_options import StreamOptions
from oasr_backend.types import Hypothesis


@dataclass(frozen=True)
class EndpointRules:
    """Lengths in encoder frames; 0 for the last two: never."""

    silence_frames: int
    start_silence_frames: int
    most_frames: int

    @classmethod
    def from_options(cls, options: StreamOptions, *, frame_s: float) -> EndpointRules:
        return cls(
            silence_frames=max(1, round(options.endpoint_silence_s / frame_s)),
            start_silence_frames=round(options.endpoint_silence_start_s / frame_s),
            most_frames=round(options.endpoint_max_s / frame_s),
        )


@dataclass(frozen=True)
class Segment:
    """Tokens `first` to before `stop` of the stream, and why the segment ended; "" while open.

    An empty one holds the silence of `silent_frames`, as (begin, end).
    """

    first: int
    stop: int
    reason: str
    silent_frames: tuple[int, int] = (0, 0)


def _holds_nothing(_token: int) -> bool:
    return False


@dataclass
class Segmenter:
    """Finds the segments of one stream. Closed ones never change; `update` looks at the rest.

    A segment that is too long ends before a token that `starts_word`, unless the token before it
    `holds_next`.
    """

    rules: EndpointRules
    starts_word: Callable[[int], bool]
    holds_next: Callable[[int], bool] = _holds_nothing
    closed: list[Segment] = field(default_factory=list)
    # Where the open segment begins: a token, and the frame from which silence counts.
    num_closed_tokens: int = 0
    _begin_frame: int = 0

    def update(self, rest: Hypothesis, num_frames: int) -> list[Segment]:
        """Closes what has ended. `rest` are the tokens after the first `num_closed_tokens`.

        `num_frames` is how many frames the stream has heard. Returns the segments just closed.
        """
        num_before, offset = len(self.closed), self.num_closed_tokens
        begin = 0
        for index, frame in enumerate(rest.times):
            if index == begin:
                self._close_silence(until_frame=frame)
            is_long = frame - rest.times[begin] >= self.rules.most_frames > 0
            if index > begin and is_long and self._may_end_before(rest.tokens, index):
                self._close(offset + index, "length", frame)
                begin = index
            later = rest.times[index + 1] if index + 1 < len(rest.times) else num_frames
            if later - frame > self.rules.silence_frames:
                self._close(offset + index + 1, "silence", frame + 1 + self.rules.silence_frames)
                begin = index + 1
        if begin == len(rest.times):
            self._close_silence(until_frame=num_frames)
        return self.closed[num_before:]

    def _may_end_before(self, tokens: Sequence[int], index: int) -> bool:
        return self.starts_word(tokens[index]) and not self.holds_next(tokens[index - 1])

    def _close(self, stop: int, reason: str, begin_frame: int) -> None:
        self.closed.append(Segment(self.num_closed_tokens, stop, reason))
        self.num_closed_tokens, self._begin_frame = stop, begin_frame

    def _close_silence(self, *, until_frame: int) -> None:
        """A long silence before speech is one empty segment, however long it grows."""
        limit, begin = self.rules.start_silence_frames, self._begin_frame
        is_after_another = bool(self.closed) and self.closed[-1].reason == "no_speech"
        if limit and not is_after_another and until_frame - begin >= limit:
            at = self.num_closed_tokens
            self.closed.append(Segment(at, at, "no_speech", (begin, begin + limit)))
            self._begin_frame = begin + limit
