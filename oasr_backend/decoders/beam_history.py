"""Host side of the prefix beam: the tokens, times and log-probs behind every slot of every beam.

Each of the B slots of a beam has two alignment states: its best alignment that ends in blank (slot)
and the one that ends in the last token (B + slot). The device says per frame where each state comes
from and whether it appends a token; this module follows those traces once per chunk, for all rows
together. Entries that all live states of a row share move to a plain list, so that memory and time
do not grow with the age of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from oasr_backend.decoders.base import ChunkRows, IntArray
from oasr_backend.types import Hypothesis

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

ScalarT = TypeVar("ScalarT", bound=np.generic)

_FIRST_WINDOW = 32
# Fields of a window entry. The log-prob belongs to the token *before* the entry's token: only an
# extension closes the run of the token before.
_TOKEN, _TIME, _PREVIOUS_LOG_PROB = range(3)


@dataclass(frozen=True)
class ChunkTrace:
    """T frames of N rows; S = 2B alignment states."""

    source_TNS: IntArray
    token_TNB: Int32Array  # -1: nothing appended
    log_prob_TNB: FloatArray  # of the slot's last token in this frame
    alive_NS: npt.NDArray[np.bool_]
    best_state_NB: IntArray
    score_NB: npt.NDArray[np.float64]

    @classmethod
    def from_packed(cls, packed: Int32Array, shape_T4NB: Sequence[int]) -> ChunkTrace:
        frames, _, rows, beam = shape_T4NB
        cells = rows * beam
        traces = packed[: frames * 4 * cells].reshape(frames, 4, rows, beam)
        flags_NB = packed[frames * 4 * cells :][:cells].reshape(rows, beam)
        score = packed[(frames * 4 + 1) * cells :].copy().view(np.float64)
        return cls(
            source_TNS=np.concatenate((traces[:, 0], traces[:, 1]), axis=2).astype(np.int64),
            token_TNB=traces[:, 2],
            log_prob_TNB=np.ascontiguousarray(traces[:, 3]).view(np.float32),
            alive_NS=np.concatenate((flags_NB & 1, flags_NB & 2), axis=1) > 0,
            best_state_NB=np.arange(beam) + beam * (flags_NB >> 2),
            score_NB=score.reshape(rows, beam),
        )


@dataclass
class _Stable:
    """The part of a transcript that all hypotheses share."""

    tokens: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class BeamHistory:
    def __init__(self, beam_size: int) -> None:
        self._beam = beam_size
        states = 2 * beam_size
        self._window_RSL3 = np.zeros((0, states, _FIRST_WINDOW, 3), dtype=np.int32)
        self._length_RS = np.zeros((0, states), dtype=np.int64)
        self._peak_RS = np.zeros((0, states), dtype=np.float32)
        self._best_state_RB = np.zeros((0, beam_size), dtype=np.int64)
        self._score_RB = np.zeros((0, beam_size))
        self._stable: list[_Stable] = []

    @property
    def window_entries(self) -> int:
        """Tokens per state that the window has room for."""
        return self._window_RSL3.shape[2]

    def grow(self, num_rows: int) -> None:
        added = num_rows - len(self._stable)
        self._window_RSL3 = _more_rows(self._window_RSL3, added)
        self._length_RS = _more_rows(self._length_RS, added)
        self._peak_RS = _more_rows(self._peak_RS, added)
        self._best_state_RB = _more_rows(self._best_state_RB, added)
        self._score_RB = _more_rows(self._score_RB, added)
        self._stable.extend(_Stable() for _ in range(added))

    def reset_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._length_RS[row] = 0
            self._peak_RS[row] = 0.0
            self._best_state_RB[row] = np.arange(self._beam)
            self._score_RB[row] = [0.0] + [-np.inf] * (self._beam - 1)
            self._stable[row] = _Stable()

    def extend(self, trace: ChunkTrace, chunk: ChunkRows) -> None:
        """Follow one chunk. Rows are sorted by num_frames, longest first, none is 0."""
        rows = chunk.rows
        closed_TNB, peak_NS = self._follow_peaks(trace, chunk)
        event_TNS, closed_TNS, origin_NS = self._trace_back(trace, closed_TNB, chunk)
        window_NSL3, length_NS = self._append(event_TNS, closed_TNS, origin_NS, chunk)
        self._peak_RS[rows] = peak_NS
        self._best_state_RB[rows] = trace.best_state_NB
        self._score_RB[rows] = trace.score_NB
        self._settle(window_NSL3, length_NS, trace, rows)

    def _follow_peaks(self, trace: ChunkTrace, chunk: ChunkRows) -> tuple[FloatArray, FloatArray]:
        """Best log-prob of each state's last token so far.

        Also per frame and slot that of the token which an extension closes.
        """
        beam = self._beam
        peak_NS = self._peak_RS[chunk.rows]
        closed_TNB = np.zeros(trace.log_prob_TNB.shape, dtype=np.float32)
        flat_source_TNS = _flat_states(trace.source_TNS)
        for t, n in enumerate(_active(chunk)):
            moved_NS = peak_NS.ravel().take(flat_source_TNS[t, :n])
            closed_TNB[t, :n] = moved_NS[:, beam:]
            log_prob_NB = trace.log_prob_TNB[t, :n]
            longer_NB = np.maximum(moved_NS[:, beam:], log_prob_NB)
            appended_NB = trace.token_TNB[t, :n] >= 0
            moved_NS[:, beam:] = np.where(appended_NB, log_prob_NB, longer_NB)
            peak_NS[:n] = moved_NS
        return closed_TNB, peak_NS

    def _trace_back(
        self, trace: ChunkTrace, closed_TNB: FloatArray, chunk: ChunkRows
    ) -> tuple[Int32Array, FloatArray, IntArray]:
        """Per final state: the tokens appended (-1: none), what they closed, its flat origin."""
        token_TNS = np.full(trace.source_TNS.shape, -1, dtype=np.int32)
        token_TNS[:, :, self._beam :] = trace.token_TNB
        closed_TNS = np.zeros(trace.source_TNS.shape, dtype=np.float32)
        closed_TNS[:, :, self._beam :] = closed_TNB
        flat_source_TNS = _flat_states(trace.source_TNS)
        origin_NS = _flat_states(np.broadcast_to(np.arange(2 * self._beam), token_TNS.shape[1:]))
        event_TNS = np.full_like(token_TNS, -1)
        event_closed_TNS = np.zeros_like(closed_TNS)
        active = _active(chunk)
        for t in range(len(active) - 1, -1, -1):
            n = active[t]
            state_NS = origin_NS[:n]
            event_TNS[t, :n] = token_TNS[t].ravel().take(state_NS)
            event_closed_TNS[t, :n] = closed_TNS[t].ravel().take(state_NS)
            origin_NS[:n] = flat_source_TNS[t].ravel().take(state_NS)
        return event_TNS, event_closed_TNS, origin_NS

    def _append(
        self,
        event_TNS: Int32Array,
        closed_TNS: FloatArray,
        origin_NS: IntArray,
        chunk: ChunkRows,
    ) -> tuple[Int32Array, IntArray]:
        """Each state's window: that of its origin, then the appended tokens."""
        happened_TNS = event_TNS >= 0
        old_length_NS = self._length_RS[chunk.rows].ravel().take(origin_NS)
        length_NS = old_length_NS + happened_TNS.sum(0)
        self._reserve(int(length_NS.max()))
        states = self._window_RSL3[chunk.rows].reshape(-1, *self._window_RSL3.shape[2:])
        window_NSL3 = states.take(origin_NS, axis=0)
        position_TNS = old_length_NS + np.cumsum(happened_TNS, axis=0) - 1
        frame, row, state = np.nonzero(happened_TNS)
        place = (row, state, position_TNS[frame, row, state])
        window_NSL3[(*place, _TOKEN)] = event_TNS[frame, row, state]
        window_NSL3[(*place, _TIME)] = chunk.start_frames[row] + frame
        closed = closed_TNS[frame, row, state].view(np.int32)
        window_NSL3[(*place, _PREVIOUS_LOG_PROB)] = closed
        return window_NSL3, length_NS

    def _reserve(self, entries: int) -> None:
        while self.window_entries < entries:
            self._window_RSL3 = np.concatenate(
                (self._window_RSL3, np.zeros_like(self._window_RSL3)), axis=2
            )

    def _settle(
        self, window_NSL3: Int32Array, length_NS: IntArray, trace: ChunkTrace, rows: IntArray
    ) -> None:
        """Move what all live states share to the stable lists, and store the rest."""
        best_N = trace.best_state_NB[:, 0]
        stable_N = _num_shared(window_NSL3, length_NS, trace.alive_NS, best_N)
        for n in np.flatnonzero(stable_N).tolist():
            count = int(stable_N[n])
            self._add_stable(int(rows[n]), window_NSL3[n, best_N[n], : count + 1], count)
            window_NSL3[n, :, :-count] = window_NSL3[n, :, count:].copy()
        self._window_RSL3[rows] = window_NSL3
        self._length_RS[rows] = np.maximum(length_NS - stable_N[:, None], 0)

    def _add_stable(self, row: int, entries_L3: Int32Array, count: int) -> None:
        stable = self._stable[row]
        stable.tokens.extend(entries_L3[:count, _TOKEN].tolist())
        stable.times.extend(entries_L3[:count, _TIME].tolist())
        log_probs = entries_L3[1:, _PREVIOUS_LOG_PROB].copy().view(np.float32)
        stable.log_probs.extend(log_probs.tolist())

    def num_stable(self, row: int) -> int:
        return len(self._stable[row].tokens)

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        """Slots without any alignment are left out, save the first."""
        scores = self._score_RB[row, :nbest].tolist()
        slots = [slot for slot, score in enumerate(scores) if slot == 0 or score > -np.inf]
        return [self._hypothesis(row, slot, skip) for slot in slots]

    def _hypothesis(self, row: int, slot: int, skip: int) -> Hypothesis:
        stable = self._stable[row]
        state = self._best_state_RB[row, slot]
        entries_L3 = self._window_RSL3[row, state, : self._length_RS[row, state]]
        log_probs = entries_L3[1:, _PREVIOUS_LOG_PROB].copy().view(np.float32).tolist()
        if len(entries_L3):
            log_probs.append(float(self._peak_RS[row, state]))
        first = max(0, skip - len(stable.tokens))
        return Hypothesis(
            (*stable.tokens[skip:], *entries_L3[first:, _TOKEN].tolist()),
            float(self._score_RB[row, slot]),
            times=(*stable.times[skip:], *entries_L3[first:, _TIME].tolist()),
            token_log_probs=(*stable.log_probs[skip:], *log_probs[first:]),
        )


def _more_rows(values: npt.NDArray[ScalarT], added: int) -> npt.NDArray[ScalarT]:
    return np.concatenate((values, np.zeros((added, *values.shape[1:]), dtype=values.dtype)))


def _flat_states(state_NS: IntArray) -> IntArray:
    """State numbers (..., N, S) as indices into the flattened (N, S)."""
    rows, states = state_NS.shape[-2:]
    return state_NS + np.arange(rows)[:, None] * states


def _active(chunk: ChunkRows) -> list[int]:
    """How many rows take part in each frame."""
    frame_T = np.arange(chunk.num_frames[0])
    return (chunk.num_frames > frame_T[:, None]).sum(1).tolist()


def _num_shared(
    window_NSL3: Int32Array,
    length_NS: IntArray,
    alive_NS: npt.NDArray[np.bool_],
    best_N: IntArray,
) -> IntArray:
    """First entries that all live states share, less one: the log-prob of a shared token stands in
    the entry after it.
    """
    rows = np.arange(len(best_N))
    best_N1L3 = window_NSL3[rows, best_N][:, None]
    same_NSL = (window_NSL3 == best_N1L3).all(-1) | ~alive_NS[:, :, None]
    shortest_N = np.where(alive_NS, length_NS, np.iinfo(np.int64).max).min(1)
    same_NL = same_NSL.all(1) & (np.arange(window_NSL3.shape[2]) < shortest_N[:, None])
    num_same_N = np.where(same_NL.all(1), same_NL.shape[1], same_NL.argmin(1))
    return np.where(alive_NS.any(1), np.maximum(num_same_N - 1, 0), 0)
