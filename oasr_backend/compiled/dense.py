"""What an encoder is given in place of its caches while its step is written down as a graph.

Shapes: B rows, H history frames, T new frames, K = H + T, L layers, F frames of the whole pool,
N K/V heads, C head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oasr_backend.errors import StreamStateError
from oasr_backend.kernels.roll import rolled


@dataclass(frozen=True)
class DenseLayout:
    """Histories that all end at the same column: a younger row's first columns are not valid."""

    valid_BK: Tensor
    read_index_BH: Tensor
    num_new_B: Tensor

    @property
    def num_frames(self) -> int:
        return self.valid_BK.shape[1]

    @property
    def history_B(self) -> Tensor:  # noqa: N802 - named for its shape
        """Columns in front of the new ones, seen or not; the same number for each row."""
        return torch.zeros_like(self.num_new_B) + self.read_index_BH.shape[1]

    @property
    def visible_B(self) -> Tensor:  # noqa: N802 - named for its shape
        """One past a row's last valid column."""
        return self.history_B + self.num_new_B


class DenseKv:
    """One layer: reads its history from the pool's frames (F, N, C), keeps what is written."""

    def __init__(self, k_FNC: Tensor, v_FNC: Tensor, layout: DenseLayout) -> None:
        self.k_cache, self.v_cache, self.layout = k_FNC, v_FNC, layout
        self._new: tuple[Tensor, Tensor] | None = None

    def write(self, k_BTNC: Tensor, v_BTNC: Tensor) -> None:
        self._new = (k_BTNC, v_BTNC)

    def gather(self) -> tuple[Tensor, Tensor]:
        """(B, K, N, C) of history and new frames."""
        k_BTNC, v_BTNC = self.new
        index_BH = self.layout.read_index_BH
        return (
            torch.cat((self.k_cache[index_BH], k_BTNC), dim=1),
            torch.cat((self.v_cache[index_BH], v_BTNC), dim=1),
        )

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """What was written. Raises StreamStateError where nothing was."""
        if self._new is None:
            raise StreamStateError("the encoder wrote no K/V into one of its layers")
        return self._new


class DenseState:
    """Rows of one declared state. What is scattered is the graph's output."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def gather(self) -> Tensor:
        return self._rows

    def scatter(self, new: Tensor) -> None:
        self._rows = new

    def roll_in(self, new: Tensor, *, axis: int) -> None:
        self._rows = rolled(self._rows, new, axis)

    def layer(self, number: int) -> DenseState:
        """One layer's rows, where axis 0 counts layers."""
        return DenseState(self._rows[number])
