"""Host side of the prefix beam: the tokens, times and log-probs behind each slot of each beam.

Per row and alignment state (see trace.py) a short window holds the newest entries (see past.py).
What all live states of a row share leaves the window for good. An early ambiguity can stay alive as
long as its stream, so a window that gets long moves its oldest entries to shared blocks instead:
the work per chunk does not grow with the age of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oasr_backend.decoders.arrays import IntArray, more_rows
from oasr_backend.decoders.chunk import ChunkRows
from oasr_backend.decoders.prefix_beam.past import (
    PREVIOUS_LOG_PROB,
    TIME,
    TOKEN,
    Entries,
    Past,
    to_log_probs,
)
from oasr_backend.decoders.prefix_beam.trace import ChunkTrace, FloatArray, Int32Array
from oasr_backend.types import Hypothesis

_FIRST_WINDOW = 32
_BLOCK = 32


class _Appended(NamedTuple):
    """What a chunk adds behind each final state."""

    token_TNS: Int32Array  # -1: nothing
    closed_TNS: FloatArray  # log-prob of the token before the appended one
    origin_NS: IntArray  # the state at the chunk's start, as an index into the flattened (N, S)


class BeamHistory:
    def __init__(self, beam_size: int, states: int) -> None:
        """`states` alignments per beam, of which the last `beam_size` may append."""
        self._beam = beam_size
        self._window_3RSL: Entries = np.zeros((3, 0, states, _FIRST_WINDOW), dtype=np.int32)
        self._length_RS: IntArray = np.zeros((0, states), dtype=np.int64)
        self._peak_RS: FloatArray = np.zeros((0, states), dtype=np.float32)
        self._best_state_RB: IntArray = np.zeros((0, beam_size), dtype=np.int64)
        self._score_RB = np.zeros((0, beam_size))
        # The number that each state had when the newest block was pushed.
        self._past_state_RS: IntArray = np.zeros((0, states), dtype=np.int64)
        self._pasts: list[Past] = []

    @property
    def window_entries(self) -> int:
        """Entries per state that the window has room for."""
        return self._window_3RSL.shape[3]

    def grow(self, num_rows: int) -> None:
        self._window_3RSL = more_rows(self._window_3RSL, num_rows, axis=1)
        self._length_RS = more_rows(self._length_RS, num_rows)
        self._peak_RS = more_rows(self._peak_RS, num_rows)
        self._best_state_RB = more_rows(self._best_state_RB, num_rows)
        self._score_RB = more_rows(self._score_RB, num_rows)
        self._past_state_RS = more_rows(self._past_state_RS, num_rows)
        self._pasts.extend(Past() for _ in range(num_rows - len(self._pasts)))

    def reset_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._length_RS[row] = 0
            self._peak_RS[row] = 0.0
            self._best_state_RB[row] = np.arange(self._beam)
            self._score_RB[row] = -np.inf
            self._score_RB[row, 0] = 0.0
            self._past_state_RS[row] = np.arange(self._past_state_RS.shape[1])
            self._pasts[row] = Past()

    def extend(self, trace: ChunkTrace, chunk: ChunkRows) -> None:
        """Follow one chunk. Rows are sorted by num_frames, longest first, none is 0."""
        rows, active = chunk.rows, chunk.active_rows()
        peak_NS, closed_TNB = _follow_peaks(trace, self._peak_RS[rows], active)
        appended = _trace_back(trace, closed_TNB, active)
        past_state_NS = self._past_state_RS[rows].ravel().take(appended.origin_NS)
        window_3NSL, length_NS = self._append(appended, chunk)
        length_NS = np.where(trace.alive_NS, length_NS, 0)
        self._peak_RS[rows] = peak_NS
        self._best_state_RB[rows] = trace.best_state_NB
        self._score_RB[rows] = trace.score_NB
        self._past_state_RS[rows] = past_state_NS
        moved_N = self._move_to_past(window_3NSL, length_NS, trace, rows)
        self._length_RS[rows] = np.maximum(length_NS - moved_N[:, None], 0)
        self._window_3RSL[:, rows, :, : window_3NSL.shape[3]] = window_3NSL

    def _append(self, appended: _Appended, chunk: ChunkRows) -> tuple[Entries, IntArray]:
        """Each state's window, cut to the longest: that of its origin, then the new entries."""
        happened_TNS = appended.token_TNS >= 0
        length_NS = self._length_RS[chunk.rows].ravel().take(appended.origin_NS)
        place_TNS = length_NS + np.cumsum(happened_TNS, axis=0) - 1
        length_NS = length_NS + happened_TNS.sum(0)
        longest = max(1, int(length_NS.max()))
        self._reserve(longest)
        states_3XL = self._window_3RSL[:, chunk.rows, :, :longest].reshape(3, -1, longest)
        window_3NSL = states_3XL.take(appended.origin_NS, axis=1)
        frame, row, state = np.nonzero(happened_TNS)
        place = (row, state, place_TNS[frame, row, state])
        window_3NSL[TOKEN][place] = appended.token_TNS[frame, row, state]
        window_3NSL[TIME][place] = chunk.start_frames[row] + frame
        closed = appended.closed_TNS[frame, row, state]
        window_3NSL[PREVIOUS_LOG_PROB][place] = closed.view(np.int32)
        return window_3NSL, length_NS

    def _reserve(self, entries: int) -> None:
        while self.window_entries < entries:
            both = (self._window_3RSL, np.zeros_like(self._window_3RSL))
            self._window_3RSL = np.concatenate(both, axis=3)

    def _move_to_past(
        self, window_3NSL: Entries, length_NS: IntArray, trace: ChunkTrace, rows: IntArray
    ) -> IntArray:
        """Take settled or too many entries from the windows' front, in place. Returns how many."""
        shortest_N = np.where(trace.alive_NS, length_NS, np.iinfo(np.int64).max).min(1)
        shortest_N[~trace.alive_NS.any(1)] = 0
        best_N = trace.best_state_NB[:, 0]
        shared_N = _num_shared(window_3NSL, shortest_N, trace.alive_NS, best_N)
        moved_N = np.zeros_like(shared_N)
        for n in np.flatnonzero((shared_N > 1) | (shortest_N > 2 * _BLOCK)).tolist():
            past, window_3SL, alive_S = self._pasts[rows[n]], window_3NSL[:, n], trace.alive_NS[n]
            past_state_S = self._past_state_RS[rows[n]]
            if past.blocks:
                past.settle_blocks(past_state_S[alive_S], window_3SL[:, alive_S, 0])
            if not past.blocks and shared_N[n] > 1:
                past.settle(window_3SL[:, best_N[n], : shared_N[n]])
                moved_N[n] = shared_N[n] - 1
            elif shortest_N[n] > 2 * _BLOCK:
                moved_N[n] = count = int(shortest_N[n]) - _BLOCK
                window_3SL[:, ~alive_S, :count] = window_3SL[:, best_N[n], None, :count]
                past.push(window_3SL[:, :, :count], past_state_S)
                past_state_S[:] = np.arange(len(past_state_S))
            kept = window_3SL.shape[2] - int(moved_N[n])
            window_3SL[:, :, :kept] = window_3SL[:, :, moved_N[n] :].copy()
        return moved_N

    def num_stable(self, row: int) -> int:
        return len(self._pasts[row].tokens)

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        """Slots without any alignment are left out, save the first."""
        scores = self._score_RB[row, :nbest].tolist()
        slots = [slot for slot, score in enumerate(scores) if slot == 0 or score > -np.inf]
        return [self._hypothesis(row, slot, skip) for slot in slots]

    def _hypothesis(self, row: int, slot: int, skip: int) -> Hypothesis:
        past = self._pasts[row]
        entries_3L, log_probs = self._open_entries(row, int(self._best_state_RB[row, slot]))
        first = max(0, skip - len(past.tokens))
        return Hypothesis(
            (*past.tokens[skip:], *entries_3L[TOKEN, first:].tolist()),
            float(self._score_RB[row, slot]),
            times=(*past.times[skip:], *entries_3L[TIME, first:].tolist()),
            token_log_probs=(*past.log_probs[skip:], *log_probs[first:]),
        )

    def _open_entries(self, row: int, state: int) -> tuple[Entries, list[float]]:
        """A state's entries that are not settled, and the log-probs of their tokens."""
        past = self._pasts[row]
        entries_3L = self._window_3RSL[:, row, state, : self._length_RS[row, state]]
        if past.blocks:
            older = past.entries(int(self._past_state_RS[row, state]))
            entries_3L = np.concatenate((*older, entries_3L), axis=1)
        log_probs = to_log_probs(entries_3L[PREVIOUS_LOG_PROB, 1:])
        if entries_3L.shape[1]:
            log_probs.append(float(self._peak_RS[row, state]))
        return entries_3L, log_probs


def _follow_peaks(
    trace: ChunkTrace, peak_NS: FloatArray, active: Sequence[int]
) -> tuple[FloatArray, FloatArray]:
    """The best log-prob of each state's last token so far, after the chunk.

    Also per frame and slot that of the token which an extension in this frame closes.
    """
    own = slice(trace.source_TNS.shape[2] - trace.token_TNB.shape[2], None)
    closed_TNB = np.zeros(trace.token_TNB.shape, dtype=np.float32)
    source_TNS = _flat_states(trace.source_TNS)
    for t, n in enumerate(active):
        moved_NS = peak_NS.take(source_TNS[t, :n])
        closed_NB, log_prob_NB = moved_NS[:, own], trace.log_prob_TNB[t, :n]
        closed_TNB[t, :n] = closed_NB
        longer_NB = np.maximum(closed_NB, log_prob_NB)
        moved_NS[:, own] = np.where(trace.token_TNB[t, :n] >= 0, log_prob_NB, longer_NB)
        peak_NS[:n] = moved_NS
    return peak_NS, closed_TNB


def _trace_back(trace: ChunkTrace, closed_TNB: FloatArray, active: Sequence[int]) -> _Appended:
    frames, rows, states = trace.source_TNS.shape
    own = slice(states - trace.token_TNB.shape[2], None)
    token_TNS = np.full((frames, rows, states), -1, dtype=np.int32)
    token_TNS[:, :, own] = trace.token_TNB
    closed_TNS = np.zeros((frames, rows, states), dtype=np.float32)
    closed_TNS[:, :, own] = closed_TNB
    source_TNS = _flat_states(trace.source_TNS)
    state_NS = np.arange(rows * states).reshape(rows, states)
    for t in range(frames - 1, -1, -1):
        n = active[t]
        now_NS = state_NS[:n].copy()
        token_TNS[t, :n] = token_TNS[t].take(now_NS)
        closed_TNS[t, :n] = closed_TNS[t].take(now_NS)
        token_TNS[t, n:] = -1
        state_NS[:n] = source_TNS[t].take(now_NS)
    return _Appended(token_TNS, closed_TNS, state_NS)


def _flat_states(state_TNS: IntArray) -> IntArray:
    """State numbers as indices into the flattened (N, S)."""
    _, rows, states = state_TNS.shape
    return state_TNS + np.arange(0, rows * states, states)[:, None]


def _num_shared(
    window_3NSL: Entries,
    shortest_N: IntArray,
    alive_NS: npt.NDArray[np.bool_],
    best_N: IntArray,
) -> IntArray:
    """How many first entries all live states of a row have in common."""
    rows, longest = np.arange(len(best_N)), window_3NSL.shape[3]
    differs_NSL = np.zeros(window_3NSL.shape[1:], dtype=np.bool_)
    for values_NSL in window_3NSL:
        differs_NSL |= values_NSL != values_NSL[rows, best_N][:, None]
    differs_NL = (differs_NSL & alive_NS[:, :, None]).any(1)
    differs_NL |= np.arange(longest) >= shortest_N[:, None]
    return np.where(differs_NL.any(1), differs_NL.argmax(1), longest)
