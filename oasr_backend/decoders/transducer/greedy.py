"""Greedy search over a transducer: its host part. The head has chosen every frame's unit.

Shapes: N rows of a chunk, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from oasr_backend.decoders.chunk import ChunkRows, Finish, Tail
from oasr_backend.decoders.readback import HostArray, begin_copy
from oasr_backend.decoders.transcript import Transcripts
from oasr_backend.types import Hypothesis


class TransducerGreedySearch:
    """Implements Search. Every unit but the blank is a token, whose time is its frame.

    The score of a hypothesis is the sum of its path's log-probs over all frames, blanks included.
    """

    def __init__(self, blank_id: int) -> None:
        self._blank_id = blank_id
        self._transcripts = Transcripts()

    def grow(self, num_rows: int) -> None:
        self._transcripts.grow(num_rows)

    def reset_rows(self, rows: Sequence[int]) -> None:
        self._transcripts.reset_rows(rows)

    def begin(self, frames_NTX: torch.Tensor, chunk: ChunkRows) -> Finish:
        """`frames_NTX` is (N, T, 2) int32: units, and the bits of their float32 log-probs."""
        found = begin_copy(frames_NTX)
        return lambda: self._extend(found(), chunk)

    def _extend(self, packed_NT2: HostArray, chunk: ChunkRows) -> None:
        valid_NT = np.arange(packed_NT2.shape[1]) < chunk.num_frames[:, None]
        ids_NT = packed_NT2[..., 0]
        log_probs_NT = np.ascontiguousarray(packed_NT2[..., 1]).view(np.float32)
        path_N = np.where(valid_NT, log_probs_NT, 0).sum(1, dtype=np.float64)
        self._transcripts.scores_R[chunk.rows] += path_N
        spoken_N, spoken_T = np.nonzero(valid_NT & (ids_NT != self._blank_id))
        columns = (
            chunk.rows[spoken_N].tolist(),
            ids_NT[spoken_N, spoken_T].tolist(),
            (chunk.start_frames[spoken_N] + spoken_T).tolist(),
            log_probs_NT[spoken_N, spoken_T].tolist(),
        )
        for row, token, time, log_prob in zip(*columns, strict=True):
            self._transcripts[row].add(token, time, log_prob)

    def num_stable(self, row: int) -> int:
        return self._transcripts.num_stable(row)

    def tail(self, row: int, skip: int) -> Tail:
        return self._transcripts.tail(row, skip)

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:  # noqa: ARG002
        return [self._transcripts.hypothesis(row, skip=skip)]
