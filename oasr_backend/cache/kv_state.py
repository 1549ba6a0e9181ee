"""What the host knows of the streams' histories beside their table rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oasr_backend.cache.kv_tables import PagedTables
from oasr_backend.cache.types import CacheConfig


def require(holds: bool, what: str) -> None:
    """Raises AssertionError unless an invariant holds."""
    if not holds:
        raise AssertionError(f"cache integrity: {what}")


class SlotKvStates:
    """Arrays by slot, so that a step touches all of its streams at once.

    `num_blocks` is how much of a slot's table row is in use, `position` the absolute position of
    the first frame of its next chunk. A `sealed` stream has committed a short chunk and takes no
    more. The blocks themselves, the hidden frames and the lengths are the tables'.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_blocks: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.position: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.has_room: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.was_prepared: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.sealed: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)

    def begin(self, slot: int, *, num_blocks: int, position: int) -> None:
        self.num_blocks[slot] = num_blocks
        self.position[slot] = position
        self.has_room[slot] = self.was_prepared[slot] = self.sealed[slot] = False

    def check_integrity(self, slot: int, config: CacheConfig, tables: PagedTables) -> None:
        """Raises AssertionError unless the slot's blocks can hold its frames."""
        num_blocks, block_size = int(self.num_blocks[slot]), config.block_size_frames
        start, seqlen = int(tables.host_starts[slot]), int(tables.host_seqlens[slot])
        what = f"slot {slot}: {num_blocks} blocks, frames {start} to {seqlen}"
        require(not tables.host_table[slot, num_blocks:].any(), f"table row is longer: {what}")
        require(0 <= start < block_size, f"a whole block is hidden: {what}")
        require(start <= seqlen <= num_blocks * block_size, f"frames outside of blocks: {what}")
        require(num_blocks <= config.blocks_per_stream, f"over the share: {what}")
        visible = seqlen - start
        require(not config.evicts or visible <= config.max_cache_frames, f"too long: {what}")
        room = num_blocks * block_size - seqlen
        require(not self.has_room[slot] or room >= config.chunk_size, f"no room made: {what}")

    def check_new(self, slots: list[int], tables: PagedTables) -> None:
        """Raises AssertionError unless nothing is left of the last streams of these slots."""
        arrays = (
            tables.host_table, tables.host_starts, tables.host_seqlens, self.num_blocks,
            self.position, self.has_room, self.was_prepared, self.sealed,
        )  # fmt: skip
        is_new = not any(array[slots].any() for array in arrays)
        require(is_new, f"one of the free slots {slots} is not new")
