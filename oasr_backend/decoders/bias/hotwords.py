"""The context graphs of many streams behind one batched look-up.

A stream's row names a graph; streams with equal phrases share it. The tables of all graphs in use
lie one behind the other on the device and are put together anew when one comes; the tables of
graphs that no stream uses any more go on that occasion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oasr_backend.decoders.arrays import IntArray, doubled, more_rows
from oasr_backend.decoders.bias.base import Looked
from oasr_backend.decoders.bias.context_graph import ContextGraph
from oasr_backend.device import to_device


class _Tables(NamedTuple):
    """G graphs. The state behind (s, k) of graph g is at `start_G[g] + s * width_G[g] + k`.

    What belongs to state s alone is at `first_G[g] + s`.
    """

    class_GV: torch.Tensor
    next_X: torch.Tensor
    held_Y: torch.Tensor
    earned_Y: torch.Tensor
    width_G: torch.Tensor
    start_G: torch.Tensor
    first_G: torch.Tensor


class HotwordScorer:
    """Implements PrefixScorer. Rows without a graph must not be decoded."""

    initial_state = 0

    def __init__(self, starts_word: Sequence[bool], device: torch.device) -> None:
        """`starts_word[i]` says whether unit i starts a word."""
        self._device = device
        self._starts_word_V = torch.tensor(starts_word, dtype=torch.float64, device=device)
        self._graphs: dict[Hashable, ContextGraph] = {}
        self._uses: Counter[Hashable] = Counter()
        self._key_of_row: dict[int, Hashable] = {}
        self._place_of_key: dict[Hashable, int] = {}
        # Where each row's graph is in the tables, as long as there are tables.
        self._place_R: IntArray = np.zeros(0, dtype=np.int64)
        self._tables: _Tables | None = None

    @property
    def num_graphs(self) -> int:
        """Those that streams use now."""
        return sum(count > 0 for count in self._uses.values())

    @property
    def rows(self) -> set[int]:
        """Those that have a graph."""
        return set(self._key_of_row)

    def assign(self, rows: Sequence[int], key: Hashable, graph: ContextGraph) -> None:
        """These rows follow the graph until they are released; equal keys mean equal graphs."""
        if key not in self._graphs:
            self._graphs = {k: g for k, g in self._graphs.items() if self._uses[k] > 0}
            self._graphs[key] = graph
            self._tables = None
        self._place_R = more_rows(
            self._place_R, doubled(len(self._place_R), row=max(rows, default=-1))
        )
        for row in rows:
            self._key_of_row[row] = key
            if self._tables is not None:
                self._place_R[row] = self._place_of_key[key]
        self._uses[key] += len(rows)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            key = self._key_of_row.pop(row)
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]

    def for_chunk(self, rows: IntArray) -> _ChunkHotwords:
        tables = self._tables if self._tables is not None else self._rebuilt()
        place_N = to_device(self._place_R[rows], self._device)
        return _ChunkHotwords(tables, place_N, self._starts_word_V)

    def check_integrity(self) -> None:
        """Every row has a graph, and graphs count their rows."""
        assert Counter(self._key_of_row.values()) == self._uses, "a graph counts a row wrongly"
        assert set(self._uses) <= set(self._graphs), "a graph in use is gone"
        if self._tables is not None:
            for row, key in self._key_of_row.items():
                assert self._place_R[row] == self._place_of_key[key], "a row follows another graph"

    def _rebuilt(self) -> _Tables:
        graphs = list(self._graphs.values())
        self._place_of_key = {key: place for place, key in enumerate(self._graphs)}
        for row, key in self._key_of_row.items():
            self._place_R[row] = self._place_of_key[key]
        self._tables = _Tables(
            class_GV=self._put(np.stack([graph.class_V for graph in graphs])),
            next_X=self._put(np.concatenate([graph.next_SK.ravel() for graph in graphs])),
            held_Y=self._put(np.concatenate([graph.held_S for graph in graphs])),
            earned_Y=self._put(np.concatenate([graph.earned_S for graph in graphs])),
            width_G=self._put(np.array([graph.next_SK.shape[1] for graph in graphs])),
            start_G=self._put(_starts([graph.next_SK.size for graph in graphs])),
            first_G=self._put(_starts([graph.held_S.size for graph in graphs])),
        )
        return self._tables

    def _put(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class _ChunkHotwords:
    """Implements ChunkScorer."""

    def __init__(self, tables: _Tables, place_N: torch.Tensor, starts_word_V: torch.Tensor) -> None:
        self._tables = tables
        self._starts_word_V = starts_word_V
        self._place_N11 = place_N[:, None, None]
        self._width_N11 = tables.width_G[self._place_N11]
        self._start_N11 = tables.start_G[self._place_N11]
        self._first_N1 = tables.first_G[place_N][:, None]

    def look_up(self, id_XNAC: torch.Tensor) -> Looked:
        """Where each unit's column of the row's table begins, and whether it starts a word."""
        num_rows, unit_XNAC = id_XNAC.shape[-3], id_XNAC.clamp(min=0)
        class_XNAC = self._tables.class_GV[self._place_N11[:num_rows], unit_XNAC]
        return class_XNAC + self._start_N11[:num_rows], self._starts_word_V[unit_XNAC]

    def extend(self, looked: Looked, state_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        column_NAC, starts_word_NAC = looked
        num_rows = state_NB.shape[0]
        held_Y, own_NB = self._tables.held_Y, self._first_N1[:num_rows] + state_NB
        place_NBC = state_NB[..., None] * self._width_N11[:num_rows] + column_NAC
        next_NBC = self._tables.next_X[place_NBC].long()
        gain_NBC = held_Y[self._first_N1[:num_rows, None] + next_NBC] - held_Y[own_NB][..., None]
        return gain_NBC + self._tables.earned_Y[own_NB][..., None] * starts_word_NAC, next_NBC

    def settle(self, state_NB: torch.Tensor) -> torch.Tensor:
        own_NB = self._first_N1[: state_NB.shape[0]] + state_NB
        return self._tables.earned_Y[own_NB] - self._tables.held_Y[own_NB]


def _starts(sizes: Sequence[int]) -> IntArray:
    return np.cumsum([0, *sizes[:-1]])
