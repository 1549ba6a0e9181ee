"""Which blocks each slot's history holds and which of their frames it sees, in host arrays."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from oasr_backend.cache.kv_tables import IntArray, PagedTables
from oasr_backend.cache.types import CacheConfig

BoolArray = NDArray[np.bool_]


class KvRows:
    """Integer arithmetic over the rows of a step; blocks come in and go out as ids.

    `num_blocks` is how much of a slot's table row is in use, `position` the absolute position of
    the first frame of its next chunk; both are arrays by slot. The rest is in the tables.
    """

    def __init__(self, config: CacheConfig, tables: PagedTables, num_rows: int) -> None:
        self.config = config
        self.tables = tables
        self.num_blocks: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.position: IntArray = np.zeros(num_rows, dtype=np.int64)

    def begin(self, slot: int, blocks_N: IntArray, *, frames: int) -> None:
        """Starts a row with a history of `frames` in these blocks."""
        self.num_blocks[slot], self.position[slot] = blocks_N.size, frames
        self.tables.set_lengths([slot], starts=[0], seqlens=[frames])
        self.tables.append([slot] * blocks_N.size, np.arange(blocks_N.size), blocks_N)

    def clear(self, slot: int) -> IntArray:
        """Forgets the row; returns the blocks that it held."""
        blocks_N = self.blocks_of(slot)
        self.tables.clear_row(slot, width=blocks_N.size)
        self.num_blocks[slot] = self.position[slot] = 0
        return blocks_N

    def blocks_of(self, slot: int) -> IntArray:
        """A copy of the row's blocks, oldest first."""
        return self.tables.host_table[slot, : self.num_blocks[slot]].astype(np.int64)

    def visible_frames(self, slots_B: IntArray) -> IntArray:
        visible_B: IntArray = self.tables.host_seqlens[slots_B] - self.tables.host_starts[slots_B]
        return visible_B

    def missing_blocks(self, slots_B: IntArray) -> IntArray:
        """Blocks to take before a whole chunk fits behind the frames of each row."""
        frames_B = self.tables.host_seqlens[slots_B] + self.config.chunk_size
        needed_B = -(-frames_B // self.config.block_size_frames)
        return np.maximum(0, needed_B - self.num_blocks[slots_B])

    def is_over_share(self, slots_B: IntArray, missing_B: IntArray) -> BoolArray:
        """Whether a row would hold more blocks than one stream may."""
        over_B: BoolArray = self.num_blocks[slots_B] + missing_B > self.config.blocks_per_stream
        return over_B

    def append(self, slots_B: IntArray, counts_B: IntArray, blocks_N: IntArray) -> None:
        """Names `counts_B` of the blocks behind those that each row has."""
        if not blocks_N.size:
            return
        first_N = np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        held_N = np.repeat(self.num_blocks[slots_B], counts_B)
        columns_N = held_N + np.arange(blocks_N.size) - first_N
        self.tables.append(np.repeat(slots_B, counts_B), columns_N, blocks_N)
        self.num_blocks[slots_B] += counts_B

    def rebase_positions(self, slots_B: IntArray) -> None:
        """Puts the oldest visible frame at 0 where a chunk would pass position_limit_frames."""
        limit = self.config.position_limit_frames - self.config.chunk_size
        far_N = slots_B[self.position[slots_B] > limit]
        self.position[far_N] = self.visible_frames(far_N)

    def advance(self, slots_B: IntArray, added_B: IntArray | int, *, keep_frames: int) -> IntArray:
        """Counts the added frames and hides the oldest beyond `keep_frames` (negative: none).

        Returns the blocks whose frames are all hidden; the rows do not name them any more.
        """
        starts_B: IntArray = self.tables.host_starts[slots_B].astype(np.int64)
        seqlens_B = self.tables.host_seqlens[slots_B] + added_B
        if keep_frames >= 0:
            starts_B = np.maximum(starts_B, seqlens_B - keep_frames)
        dropped_B, starts_B = np.divmod(starts_B, self.config.block_size_frames)
        freed_N = self._drop_blocks(slots_B, dropped_B)
        seqlens_B = seqlens_B - dropped_B * self.config.block_size_frames
        self.tables.set_lengths(slots_B, starts=starts_B, seqlens=seqlens_B)
        return freed_N

    def _drop_blocks(self, slots_B: IntArray, dropped_B: IntArray) -> IntArray:
        """Takes the oldest blocks off, with one shift for each number of them."""
        freed = [np.empty(0, dtype=np.int64)]
        width = int(self.num_blocks[slots_B].max(initial=0))
        for num_dropped in range(1, 1 + int(dropped_B.max(initial=0))):
            slots_N = slots_B[dropped_B == num_dropped]
            freed.append(self.tables.host_table[slots_N, :num_dropped].ravel().astype(np.int64))
            self.tables.drop_head(slots_N, num_dropped, width=width)
        self.num_blocks[slots_B] -= dropped_B
        return np.concatenate(freed)

    # Invariants

    def check_integrity(self, open_slots: Collection[int]) -> None:
        """Raises AssertionError unless every open row fits its blocks and the others are as new."""
        self.tables.check_integrity()
        for slot in open_slots:
            self._check_row(slot)
        closed = sorted(set(range(self.config.max_batch_size)).difference(open_slots))
        tables = self.tables
        arrays = (
            tables.host_table, tables.host_starts, tables.host_seqlens, self.num_blocks,
            self.position,
        )  # fmt: skip
        is_new = not any(array[closed].any() for array in arrays)
        require(is_new, f"one of the free slots {closed} is not new")

    def _check_row(self, slot: int) -> None:
        num_blocks, block_size = int(self.num_blocks[slot]), self.config.block_size_frames
        start, seqlen = int(self.tables.host_starts[slot]), int(self.tables.host_seqlens[slot])
        what = f"slot {slot}: {num_blocks} blocks, frames {start} to {seqlen}"
        require(not self.tables.host_table[slot, num_blocks:].any(), f"row is longer: {what}")
        require(0 <= start < block_size, f"a whole block is hidden: {what}")
        require(start <= seqlen <= num_blocks * block_size, f"frames outside of blocks: {what}")
        require(num_blocks <= self.config.blocks_per_stream, f"over the share: {what}")
        is_bounded = not self.config.evicts or seqlen - start <= self.config.max_cache_frames
        require(is_bounded, f"too long: {what}")


def require(holds: bool, what: str) -> None:
    """Raises AssertionError unless an invariant holds."""
    if not holds:
        raise AssertionError(f"cache integrity: {what}")
