"""Segments of a stream: where silence, or length, ends one and the next one begins.

Nothing but the frames of the tokens decides, so that the borders do not depend on how the audio was
cut, and neither encoder nor decoder learns of them: no word is lost, and a token that is repeated
across a border stays two tokens, because blanks lie between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from oasr_backend.options import StreamOptions
from oasr_backend.types import Hypothesis

#: What is spoken as one character, or one cluster, has no pause as long as this.
LONGEST_PAUSE_IN_CLUSTER_S = 1.0


@dataclass(frozen=True)
class EndpointRules:
    """Lengths in encoder frames; 0 for `start_silence_frames` and `most_frames`: never."""

    silence_frames: int
    start_silence_frames: int
    most_frames: int
    # A silence behind a token that awaits another one ends a segment by itself if longer.
    cluster_frames: int = 0

    @classmethod
    def from_options(cls, options: StreamOptions, *, frame_s: float) -> EndpointRules:
        return cls(
            silence_frames=max(1, round(options.endpoint_silence_s / frame_s)),
            start_silence_frames=round(options.endpoint_silence_start_s / frame_s),
            most_frames=round(options.endpoint_max_s / frame_s),
            cluster_frames=round(LONGEST_PAUSE_IN_CLUSTER_S / frame_s),
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


def _always(_before: int, _after: int) -> bool:
    return True


def _never(_token: int) -> bool:
    return False


@dataclass
class Segmenter:
    """Finds the segments of one stream. Closed ones never change; `update` looks at the rest.

    A segment that is too long ends before a token that `starts_word`, if it `may_part` from the
    token before. Silence ends one at once, but behind a token that `awaits_next` the next token
    has `cluster_frames` to come and tell whether it `may_part`.
    """

    rules: EndpointRules
    starts_word: Callable[[int], bool]
    may_part: Callable[[int, int], bool] = _always
    awaits_next: Callable[[int], bool] = _never
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
            if index > begin and is_long and self._may_end_before(rest, index):
                self._close(offset + index, "length", frame)
                begin = index
            if self._ends_in_silence(rest, index, num_frames):
                self._close(offset + index + 1, "silence", frame + 1 + self.rules.silence_frames)
                begin = index + 1
        if begin == len(rest.times):
            self._close_silence(until_frame=num_frames)
        return self.closed[num_before:]

    def _may_end_before(self, rest: Hypothesis, index: int) -> bool:
        before, after = rest.tokens[index - 1 : index + 1]
        return self.starts_word(after) and self.may_part(before, after)

    def _ends_in_silence(self, rest: Hypothesis, index: int, num_frames: int) -> bool:
        """Whether the silence behind the token is a border, as far as it has lasted."""
        token, is_last = rest.tokens[index], index + 1 == len(rest.tokens)
        until_frame = num_frames if is_last else rest.times[index + 1]
        silence = until_frame - rest.times[index]
        if silence <= self.rules.silence_frames:
            return False
        if silence > self.rules.cluster_frames or not self.awaits_next(token):
            return True
        return not is_last and self.may_part(token, rest.tokens[index + 1])

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
