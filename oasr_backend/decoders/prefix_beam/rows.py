"""What the beam searches have in common: rows of beams on the device, their history on the host.

Beams are a named tuple of tensors (X, N, B): any X, the rows, and the slots of a beam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from oasr_backend.decoders.arrays import IntArray
from oasr_backend.decoders.chunk import ChunkRows, Tail
from oasr_backend.decoders.prefix_beam.history import BeamHistory
from oasr_backend.errors import StreamStateError
from oasr_backend.types import Hypothesis

BeamsT = TypeVar("BeamsT", bound=tuple[Tensor, ...])
RecordT = TypeVar("RecordT")


class BeamRows(Generic[BeamsT]):
    """The storage of a beam search, and what of `Search` follows from it.

    Scores and hashes stay on the device, tokens and times on the host.
    """

    def __init__(
        self, make: Callable[[Iterable[Tensor]], BeamsT], fresh: Iterable[Tensor], *, states: int
    ) -> None:
        """`fresh` is one row at the start of a stream; a beam has `states` alignment states."""
        self._make = make
        self._fresh = make(fresh)
        self._device = self._fresh[0].device
        self._pool = make(x[:, :0] for x in self._fresh)
        self._history = BeamHistory(self._fresh[0].shape[2], states)

    @torch.inference_mode()
    def grow(self, num_rows: int) -> None:
        added = num_rows - self._pool[0].shape[1]
        pairs = zip(self._pool, self._fresh, strict=True)
        self._pool = self._make(torch.cat((a, b.expand(-1, added, -1)), dim=1) for a, b in pairs)
        self._history.grow(num_rows)

    @torch.inference_mode()
    def reset_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            for values, fresh in zip(self._pool, self._fresh, strict=True):
                values[:, row : row + 1].copy_(fresh)
        self._history.reset_rows(rows)

    def num_stable(self, row: int) -> int:
        return self._history.num_stable(row)

    def tail(self, row: int, skip: int) -> Tail:
        (best,) = self._history.hypotheses(row, 1, skip=skip)
        return Tail(best.tokens, self._history.num_stable(row))

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        return self._history.hypotheses(row, nbest, skip=skip)

    def _take(self, row_N: Tensor) -> BeamsT:
        return self._make(x.index_select(1, row_N) for x in self._pool)

    def _put(self, row_N: Tensor, beams: BeamsT) -> None:
        for values, new in zip(self._pool, beams, strict=True):
            values.index_copy_(1, row_N, new)

    def _check_device(self, frames_NTX: Tensor) -> None:
        """Raises StreamStateError for frames on a device of another type than the beams."""
        if frames_NTX.device.type != self._device.type:
            raise StreamStateError(
                f"frames are on {frames_NTX.device}, the decoder's states on {self._device}; make "
                "the decoder with device= that of the frames"
            )


def longest_first(chunk: ChunkRows) -> tuple[IntArray, ChunkRows]:
    """The rows that take part, by falling num_frames: where they are in the chunk, and they."""
    order = np.argsort(-chunk.num_frames, kind="stable")[: np.count_nonzero(chunk.num_frames)]
    return order, ChunkRows(chunk.rows[order], chunk.num_frames[order], chunk.start_frames[order])


def run_frames(
    beams: BeamsT,
    active_rows: Sequence[int],
    step: Callable[[int, BeamsT], tuple[BeamsT, RecordT]],
    make: Callable[[Iterable[Tensor]], BeamsT],
) -> tuple[BeamsT, list[RecordT]]:
    """All frames of a chunk; `step` moves the first `active_rows[t]` rows (never increasing)."""
    finished: list[BeamsT] = []
    records: list[RecordT] = []
    for t, num_rows in enumerate(active_rows):
        if num_rows < beams[0].shape[1]:
            finished.append(make(x[:, num_rows:] for x in beams))
            beams = make(x[:, :num_rows] for x in beams)
        beams, record = step(t, beams)
        records.append(record)
    if finished:
        parts = zip(beams, *reversed(finished), strict=True)
        beams = make(torch.cat(part, dim=1) for part in parts)
    return beams, records
