"""What a search is told of a chunk, and what it tells of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oasr_backend.decoders.arrays import IntArray


@dataclass(frozen=True)
class ChunkRows:
    """Which storage row each row of a chunk belongs to; all arrays have N entries, on the host.

    `num_frames` counts the frames to decode (0: the row takes no part); `start_frames` are the
    frames that the row heard before.
    """

    rows: IntArray
    num_frames: IntArray
    start_frames: IntArray

    def active_rows(self) -> list[int]:
        """How many rows take part in each frame, up to the longest row's end."""
        frame_T = np.arange(self.num_frames.max(initial=0))
        counts: list[int] = (self.num_frames > frame_T[:, None]).sum(1).tolist()
        return counts


class Tail(NamedTuple):
    """The best hypothesis' tokens behind those that a caller has already.

    `num_stable` counts the first tokens of the whole hypothesis that can no longer change.
    """

    tokens: Sequence[int]
    num_stable: int


#: Waits for the device and takes in what it found. Called once for every chunk that was begun, in
#: their order; until then the hypotheses are those from before the chunk.
Finish = Callable[[], None]


def nothing_to_finish() -> None:
    """The `Finish` of a chunk without frames."""
