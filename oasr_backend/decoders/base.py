"""What the cache layer and the engine ask of a decoder, and what a CTC search must provide.

A transducer decoder joins by implementing `StreamDecoder` with its own state type; a new CTC search
by implementing `CtcSearch`, whose storage is addressed by row, one row per audio stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from oasr_backend.types import Hypothesis

IntArray = npt.NDArray[np.int64]
StateT = TypeVar("StateT")


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


class CtcSearch(Protocol):
    def grow(self, num_rows: int) -> None:
        """Have room for `num_rows` rows; the values of present rows are kept."""

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Put the rows at the start of a stream."""

    def begin(self, log_probs_NTV: torch.Tensor, chunk: ChunkRows) -> Finish:
        """Queue the decoding of one chunk of N rows, with at most one device-to-host copy."""

    def num_stable(self, row: int) -> int:
        """How many first tokens of the row's hypotheses can no longer change."""

    def tail(self, row: int, skip: int) -> Tail:
        """What a transcript needs of the row, at the cost of its new tokens; host memory only."""

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        """The best hypotheses of a row, best first, without their first `skip` tokens.

        Reads host memory only.
        """


class StreamDecoder(Protocol[StateT]):
    def create_state(self, batch: int, vocab_size: int) -> StateT: ...

    def reset_state(self, state: StateT, batch: int, vocab_size: int) -> None: ...

    def release_state(self, state: StateT) -> None: ...

    def decode_chunk_batch(
        self,
        log_probs_NTV: torch.Tensor,
        states: Sequence[StateT],
        *,
        num_frames: Sequence[int] | None = None,
        mask: Sequence[bool] | None = None,
    ) -> None: ...

    def best_batch(
        self, states: Sequence[StateT], *, skips: Sequence[int] | None = None
    ) -> list[Hypothesis]: ...


@dataclass(frozen=True)
class SearchKind:
    """A search by the name that a stream asks for, and the head whose output it reads."""

    name: str
    head: str
    honours: frozenset[str] = frozenset()


#: The searches of a CTC head; the first is the default.
CTC_SEARCHES: Mapping[str, SearchKind] = {
    name: SearchKind(name, head="ctc") for name in ("greedy", "prefix_beam")
}
