"""What the encoder made of the streams that will be rescored, kept until they end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oasr_backend.decoders.arrays import IntArray, doubled, more_rows
from oasr_backend.decoders.second_pass.base import Memory
from oasr_backend.device import to_device

_FIRST_CAPACITY = 32
#: The frame count of a slot that is not kept.
_NOT_KEPT = -1


class Taken(NamedTuple):
    """The frames of a stream that has ended; its blocks are in use until they are given back."""

    blocks: list[int]
    num_frames: int


class EncodedFrames:
    """One pooled buffer (P, T, D) of blocks; a block holds what one step gives to one stream.

    Streams are named by slot. The buffer doubles when it is full and is never given back, so at
    most twice `max_streams` x `max_frames` frames are held, and nothing is allocated once the
    server has seen its peak. A stream that outgrows `max_frames` gives its blocks back and is kept
    no more.
    """

    def __init__(
        self,
        *,
        block_frames: int,
        model_dim: int,
        max_frames: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.max_frames = max_frames
        self._buffer_PTD = torch.empty((0, block_frames, model_dim), dtype=dtype, device=device)
        self._free: list[int] = []
        self._blocks: dict[int, list[int]] = {}
        self._num_taken_blocks = 0
        self._num_frames_S: IntArray = np.zeros(0, dtype=np.int64)

    def __contains__(self, slot: object) -> bool:
        return slot in self._blocks

    def __len__(self) -> int:
        """Streams that are kept."""
        return len(self._blocks)

    @property
    def num_blocks(self) -> int:
        return self._buffer_PTD.shape[0]

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_frames(self, slot: int) -> int:
        return int(self._num_frames_S[slot])

    def open(self, slot: int) -> None:
        self._cover(slot)
        self._blocks[slot] = []
        self._num_frames_S[slot] = 0

    def close(self, slot: int) -> None:
        """Harmless for a stream that is not kept."""
        self._free.extend(self._forget(slot))

    def take(self, slot: int) -> Taken:
        """The frames of a stream that is kept, and is no more; `give_back` frees their blocks."""
        taken = Taken(num_frames=self.num_frames(slot), blocks=self._forget(slot))
        self._num_taken_blocks += len(taken.blocks)
        return taken

    def give_back(self, taken: Iterable[Taken]) -> None:
        for one in taken:
            self._num_taken_blocks -= len(one.blocks)
            self._free.extend(one.blocks)

    @torch.inference_mode()
    def append(self, slots_B: IntArray, num_frames_B: IntArray, encoded_BTD: Tensor) -> None:
        """Copies the rows of those streams that are kept, all in one operation.

        Only a stream's last step may give fewer than T frames. Raises what the device raises when
        it has no room; nothing has changed then, save that streams too long are closed.
        """
        rows = self._rows_to_keep(slots_B, num_frames_B)
        if not rows.size:
            return
        while len(self._free) < rows.size:
            self._double()
        blocks = self._free[-rows.size :]
        device = self._buffer_PTD.device
        row_N, block_N = to_device(np.stack((rows, np.array(blocks, dtype=np.int64))), device)
        new_NTD = encoded_BTD.index_select(0, row_N).to(self._buffer_PTD.dtype)
        self._buffer_PTD.index_copy_(0, block_N, new_NTD)
        del self._free[-rows.size :]
        self._num_frames_S[slots_B[rows]] += num_frames_B[rows]
        for slot, block in zip(slots_B[rows].tolist(), blocks, strict=True):
            self._blocks[slot].append(block)

    @torch.inference_mode()
    def gather(self, taken: Sequence[Taken]) -> Memory:
        """The frames of streams side by side. Reads nothing but the blocks that were taken."""
        counts = np.array([one.num_frames for one in taken])
        blocks_SP = np.zeros((len(taken), max(len(one.blocks) for one in taken)), dtype=np.int64)
        for row, one in enumerate(taken):
            blocks_SP[row, : len(one.blocks)] = one.blocks
        buffer_PTD = self._buffer_PTD
        is_real_ST = to_device(np.arange(counts.max()) < counts[:, None], buffer_PTD.device)
        block_X = to_device(blocks_SP.reshape(-1), buffer_PTD.device)
        encoded_XTD = buffer_PTD.index_select(0, block_X)
        encoded_STD = encoded_XTD.reshape(len(taken), -1, encoded_XTD.shape[2])[:, : counts.max()]
        # A masked frame still multiplies its value, which may be another stream's, or NaN.
        return Memory(encoded_STD.masked_fill(~is_real_ST.unsqueeze(-1), 0.0), is_real_ST)

    def check_integrity(self, open_slots: Collection[int]) -> None:
        """Every block is free, of one open stream, or taken."""
        assert self._blocks.keys() <= set(open_slots), "frames of a stream that is gone"
        held = [block for blocks in self._blocks.values() for block in blocks]
        known = [*self._free, *held]
        assert len(set(known)) == len(known), "a block has two users"
        assert len(known) + self._num_taken_blocks == self.num_blocks, "a block is lost"
        kept = np.flatnonzero(self._num_frames_S != _NOT_KEPT).tolist()
        assert set(kept) == self._blocks.keys(), "frames are counted for other slots"
        for slot, blocks in self._blocks.items():
            assert len(blocks) == -(-self.num_frames(slot) // self._buffer_PTD.shape[1])

    def _rows_to_keep(self, slots_B: IntArray, num_frames_B: IntArray) -> IntArray:
        """Rows of streams that are kept and bring frames; streams that get too long are closed."""
        self._cover(int(slots_B.max(initial=0)))
        had_B = self._num_frames_S[slots_B]
        is_kept_B = had_B != _NOT_KEPT
        is_too_long_B = is_kept_B & (had_B + num_frames_B > self.max_frames)
        for slot in slots_B[is_too_long_B].tolist():
            self.close(slot)
        return np.flatnonzero(is_kept_B & ~is_too_long_B & (num_frames_B > 0))

    def _forget(self, slot: int) -> list[int]:
        if slot not in self._blocks:
            return []
        self._num_frames_S[slot] = _NOT_KEPT
        return self._blocks.pop(slot)

    def _cover(self, slot: int) -> None:
        if slot >= len(self._num_frames_S):
            num_slots = doubled(len(self._num_frames_S), row=slot)
            self._num_frames_S = more_rows(self._num_frames_S, num_slots, fill=_NOT_KEPT)

    def _double(self) -> None:
        old = self.num_blocks
        shape = (max(_FIRST_CAPACITY, 2 * old), *self._buffer_PTD.shape[1:])
        buffer_PTD = self._buffer_PTD.new_empty(shape)
        buffer_PTD[:old] = self._buffer_PTD
        self._buffer_PTD = buffer_PTD
        self._free.extend(range(old, shape[0]))
