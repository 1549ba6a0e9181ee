"""Greedy CTC: the best token of each frame, repeats merged, blanks dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from oasr_backend.decoders.arrays import BoolArray, IntArray, more_rows
from oasr_backend.decoders.chunk import ChunkRows, Finish, Tail
from oasr_backend.decoders.readback import begin_copy
from oasr_backend.decoders.transcript import Transcripts
from oasr_backend.kernels.ctc import best_tokens
from oasr_backend.types import Hypothesis

FloatArray = npt.NDArray[np.float32]


class Runs(NamedTuple):
    """Maximal stretches of one non-blank token inside a chunk, in reading order."""

    row: IntArray
    frame: IntArray
    token: IntArray
    peak: FloatArray
    is_new: BoolArray  # False: goes on from the previous chunk


def find_runs(ids_NT: IntArray, log_probs_NT: FloatArray, previous_NT: IntArray) -> Runs:
    """`previous_NT` holds the id one frame earlier. Blank must be -1 in the id arrays."""
    num_frames = ids_NT.shape[1]
    changed_NT = ids_NT != previous_NT
    starts_NT = changed_NT.copy()
    starts_NT[:, 0] = True
    start = np.flatnonzero(starts_NT)
    peak = np.maximum.reduceat(log_probs_NT.ravel(), start)
    token = ids_NT.ravel()[start]
    spoken = token >= 0
    start = start[spoken]
    is_new = changed_NT.ravel()[start]
    return Runs(start // num_frames, start % num_frames, token[spoken], peak[spoken], is_new)


class GreedySearch:
    """Implements Search. A token's time is its first frame, its log-prob the best of its frames.

    The score of a hypothesis is the sum of its path's log-probs over all frames.
    """

    def __init__(self, blank_id: int) -> None:
        self._blank_id = blank_id
        self._last: IntArray = np.empty(0, dtype=np.int64)
        self._transcripts = Transcripts()

    def grow(self, num_rows: int) -> None:
        self._last = more_rows(self._last, num_rows, fill=-1)
        self._transcripts.grow(num_rows)

    def reset_rows(self, rows: Sequence[int]) -> None:
        self._last[list(rows)] = -1
        self._transcripts.reset_rows(rows)

    def begin(self, frames_NTX: torch.Tensor, chunk: ChunkRows) -> Finish:
        found = begin_copy(best_tokens(frames_NTX))
        return lambda: self.extend(found(), chunk)

    def extend(self, packed_2NT: npt.NDArray[np.int32], chunk: ChunkRows) -> None:
        """The host part: take in what `best_tokens` gave for the chunk."""
        valid_NT = np.arange(packed_2NT.shape[2]) < chunk.num_frames[:, None]
        ids_NT = packed_2NT[0].astype(np.int64)
        ids_NT[~valid_NT | (ids_NT == self._blank_id)] = -1
        log_probs_NT = packed_2NT[1].view(np.float32)
        previous_NT = np.concatenate((self._last[chunk.rows, None], ids_NT[:, :-1]), axis=1)
        self._store(find_runs(ids_NT, log_probs_NT, previous_NT), chunk)
        path_N = np.where(valid_NT, log_probs_NT, 0).sum(1, dtype=np.float64)
        self._transcripts.scores_R[chunk.rows] += path_N
        heard = np.flatnonzero(chunk.num_frames)
        self._last[chunk.rows[heard]] = ids_NT[heard, chunk.num_frames[heard] - 1]

    def _store(self, runs: Runs, chunk: ChunkRows) -> None:
        rows = chunk.rows[runs.row].tolist()
        times = (runs.frame + chunk.start_frames[runs.row]).tolist()
        columns = (rows, runs.token.tolist(), times, runs.peak.tolist(), runs.is_new.tolist())
        for row, token, time, peak, is_new in zip(*columns, strict=True):
            transcript = self._transcripts[row]
            if is_new:
                transcript.add(token, time, peak)
            else:
                transcript.log_probs[-1] = max(transcript.log_probs[-1], peak)

    def num_stable(self, row: int) -> int:
        return self._transcripts.num_stable(row)

    def tail(self, row: int, skip: int) -> Tail:
        return self._transcripts.tail(row, skip)

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:  # noqa: ARG002
        return [self._transcripts.hypothesis(row, skip=skip)]
