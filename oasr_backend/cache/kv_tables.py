"""Block table, lengths and starts of all slots: device tensors with a host mirror."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oasr_backend.cache.paged_kv import PagedRows
from oasr_backend.device import to_device

IntArray = NDArray[np.int64]
#: Slots, columns or numbers of frames of several rows.
Ints = Sequence[int] | IntArray


class PagedTables:
    """Persistent int32 tensors, one row a slot, never read back from the device.

        block_table    (rows, width)   physical blocks, oldest first, 0 past the last one
        cache_seqlens  (rows,)         frames from the head of the first block
        cache_starts   (rows,)         frames at that head which are evicted, < block size

    The three are views of one buffer, so a batch of edits is one upload and one scatter. Edits
    change the mirror at once and the device at `flush`, or when many have gathered.
    """

    MAX_EDITS = 4096

    def __init__(self, num_rows: int, width: int, *, device: torch.device) -> None:
        sizes = (num_rows * width, num_rows, num_rows)
        self._width = width
        self._device = device
        self._flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = np.zeros(sum(sizes), dtype=np.int32)
        self._seqlens_at, self._starts_at = sizes[0], sizes[0] + num_rows
        self.block_table = self._flat[: sizes[0]].view(num_rows, width)
        self.cache_seqlens = self._flat[self._seqlens_at : self._starts_at]
        self.cache_starts = self._flat[self._starts_at :]
        self.host_table = self._host[: sizes[0]].reshape(num_rows, width)
        self.host_seqlens = self._host[self._seqlens_at : self._starts_at]
        self.host_starts = self._host[self._starts_at :]
        self._edited: list[IntArray] = []

    def rows(self, slots_B: Tensor, block_size: int) -> PagedRows:
        """Fresh device rows of the slots (int64), in their order; padding lanes are slots too."""
        return PagedRows(
            self.block_table.index_select(0, slots_B),
            self.cache_seqlens.index_select(0, slots_B),
            block_size,
            cache_starts=self.cache_starts.index_select(0, slots_B),
        )

    def row_views(self, slot: int, block_size: int) -> PagedRows:
        """One row as views of the device tables; they follow later commits."""
        row = slice(slot, slot + 1)
        return PagedRows(
            self.block_table[row],
            self.cache_seqlens[row],
            block_size,
            cache_starts=self.cache_starts[row],
        )

    def append(self, slots: Ints, columns: Ints, blocks: Ints) -> None:
        """Names block i in row slots[i], column columns[i]."""
        index = np.asarray(slots, dtype=np.int64) * self._width + np.asarray(columns, np.int64)
        self._host[index] = blocks
        self._note(index)

    def set_lengths(self, slots: Ints, *, starts: Ints, seqlens: Ints) -> None:
        index = np.asarray(slots, dtype=np.int64)
        self.host_starts[index] = starts
        self.host_seqlens[index] = seqlens
        self._note(index + self._starts_at, index + self._seqlens_at)

    def drop_head(self, slots: Ints, num_dropped: int, *, width: int) -> None:
        """Shifts the rows left by `num_dropped` columns; `width` is the longest row's length."""
        rows = np.asarray(slots, dtype=np.int64)
        kept = width - num_dropped
        self.host_table[rows, :kept] = self.host_table[rows, num_dropped:width]
        self.host_table[rows, kept:width] = 0
        self._note((rows[:, None] * self._width + np.arange(width)).ravel())

    def clear_row(self, slot: int, *, width: int) -> None:
        """Forgets a row of which the first `width` columns are in use."""
        self.host_table[slot, :width] = 0
        self.host_starts[slot] = self.host_seqlens[slot] = 0
        first = slot * self._width
        lengths = (self._starts_at + slot, self._seqlens_at + slot)
        self._note(np.array((*range(first, first + width), *lengths), dtype=np.int64))

    def _note(self, *edited: IntArray) -> None:
        self._edited += edited
        if len(self._edited) > self.MAX_EDITS:
            self.flush()

    def set_lanes(self, slots: Sequence[int], blocks: Sequence[int], *, seqlen: int) -> None:
        """Deals `blocks` out to the rows, each repeating its share over the whole row."""
        for lane, slot in enumerate(slots):
            own = blocks[lane :: len(slots)] or [blocks[lane % len(blocks)]]
            row = [own[column % len(own)] for column in range(self._width)]
            self.append([slot] * self._width, range(self._width), row)
        self.set_lengths(slots, starts=[0] * len(slots), seqlens=[seqlen] * len(slots))
        self.flush()

    def flush(self, blocks: Ints = ()) -> Tensor:
        """Brings the device up to date in one upload; `blocks` ride along and come back (int64)."""
        index = np.concatenate([*self._edited, np.asarray(blocks, np.int64)])
        num_edits = sum(edited.size for edited in self._edited)
        self._edited.clear()
        if not index.size:
            return torch.empty(0, dtype=torch.long, device=self._device)
        # As int32 pairs beside the int32 values, so that the device has nothing to convert.
        values = self._host[index[:num_edits]]
        staged = to_device(np.concatenate([index.view(np.int32), values]), self._device)
        index_N = staged[: 2 * index.size].view(torch.int64)
        self._flat.index_copy_(0, index_N[:num_edits], staged[2 * index.size :])
        return index_N[num_edits:]

    def check_integrity(self) -> None:
        """Raises AssertionError unless device and mirror agree. Waits for the device."""
        if self._edited:
            raise AssertionError("edits of the block tables were not flushed")
        if not np.array_equal(self._flat.cpu().numpy(), self._host):
            raise AssertionError("block tables on the device differ from the host's")
