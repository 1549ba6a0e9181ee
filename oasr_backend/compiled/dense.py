"""What an encoder is given in place of its caches while its step is written down as a graph.

Shapes: B rows, H history frames, T new frames, K = H + T, L layers, F frames of the whole pool,
N K/V heads, C head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasr_backend.cache.state import SlotTensor
from oasr_backend.compiled.state_outputs import Rolled
from oasr_backend.errors import StreamStateError
from oasr_backend.kernels.roll import rolled
from oasr_backend.kernels.traced import static


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
    """Rows `slot_ids` (B,) of one declared state, read where they are stored.

    `buffer` holds all slots and layers, `layers` the same by layer, slots first, where axis 0
    counts layers. What is handed over is the graph's output.
    """

    def __init__(
        self, buffer: Tensor, layers: Sequence[Tensor], slot_ids: Tensor, slot_axis: int
    ) -> None:
        self._stored = SlotTensor(buffer, slot_ids, slot_axis)
        self._layers = layers
        self._new: Tensor | None = None
        # The axis of the frames where what was handed over are a window's newest ones.
        self._axis: int | None = None

    def gather(self) -> Tensor:
        if self._new is None:
            return self._stored.gather()
        if self._axis is None:
            return self._new
        return rolled(self._stored.gather(), self._new, self._axis)

    def scatter(self, new: Tensor) -> None:
        self._new, self._axis = new, None

    def roll_in(self, new: Tensor, *, axis: int) -> None:
        self._new, self._axis = new, axis

    @property
    def rolled(self) -> Rolled | None:
        """Where `output` is the newest frames of a window, which holds more."""
        if self._new is None or self._axis is None:
            return None
        frames = static(self._new.shape[self._axis])
        window = static(self._stored.buffer.shape[self._axis])
        return Rolled(self._axis, frames) if frames < window else None

    @property
    def output(self) -> Tensor:
        return self.gather() if self._new is None or self.rolled is None else self._new

    def layer(self, number: int) -> SlotTensor:
        """One layer's rows as they are stored, where axis 0 counts layers and 1 slots."""
        return SlotTensor(self._layers[number], self._stored.slot_ids)
