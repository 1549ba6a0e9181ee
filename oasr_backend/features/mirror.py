"""A stream's first and last samples, mirrored, so that its outer frames are whole.

    x[2] x[1] x[0] | x[0] x[1] x[2] ... x[n-2] x[n-1] | x[n-1] x[n-2] ...
          the lead |             the stream           | the tail

The rule is that of Kaldi's feature-window with snip_edges false: a sample before the first, or
past the last, is the one as far on the other side of the edge. S counts samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from oasr_backend.features.geometry import FrameGeometry
from oasr_backend.features.samples import FLOAT32, as_float32
from oasr_backend.types import Pcm16, Samples

_NOTHING: Pcm16 = np.empty(0, dtype=np.int16)


class EdgeMirror:
    """Makes the lead and the tail of one stream; empty ones where frames snip the edges.

    Both are of 16-bit samples if all those that they mirror are.
    """

    def __init__(self, frames: FrameGeometry) -> None:
        self._frames = frames
        self._lacks_lead = frames.lead_samples > 0
        #: Samples that this has made.
        self.num_made = 0

    def lead(
        self, pieces: Iterable[Samples | Pcm16], num_heard: int, *, has_ended: bool
    ) -> Samples | Pcm16:
        """What goes in front, once; empty as long as samples of it are still to come.

        `pieces` hold the `num_heard` samples of the stream. One that has ended sooner is mirrored
        again and again.
        """
        num_samples = self._frames.lead_samples
        is_due = num_heard >= (1 if has_ended else num_samples)
        if not self._lacks_lead or not is_due:
            return _NOTHING
        self._lacks_lead = False
        self.num_made += num_samples
        first_S = _first(pieces, num_samples)
        # Mirrored at both ends, a stream repeats itself after twice its length.
        place_S = np.arange(num_samples - 1, -1, -1) % (2 * first_S.size)
        lead_S: Samples | Pcm16 = first_S[np.minimum(place_S, 2 * first_S.size - 1 - place_S)]
        return lead_S

    def tail(self, pieces: Sequence[Samples | Pcm16], num_heard: int) -> Samples | Pcm16:
        """What follows the last sample, so that the last frame is whole.

        `pieces` hold the lead and the stream, or of both the samples of the frames that are not
        cut yet. More than half of the last frame is among them, so they are mirrored once at most.
        """
        num_frames = self._frames.num_stream_frames(num_heard)
        if not num_frames:
            return _NOTHING
        missing = self._frames.num_samples(num_frames) - num_heard - self.num_made
        if missing < 1:
            return _NOTHING
        self.num_made += missing
        return _first((piece[::-1] for piece in reversed(pieces)), missing)


def _first(pieces: Iterable[Samples | Pcm16], num_samples: int) -> Samples | Pcm16:
    """The first `num_samples` in `pieces`, or all if there are fewer, as one array."""
    parts: list[Samples | Pcm16] = []
    for piece in pieces:
        parts.append(piece[:num_samples])
        num_samples -= parts[-1].size
        if not num_samples:
            break
    if any(part.dtype == FLOAT32 for part in parts):
        return np.concatenate([as_float32(part) for part in parts])
    return cast(Pcm16, np.concatenate(parts))
