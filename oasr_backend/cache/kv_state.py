"""One stream's blocks and the frames in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from oasr_backend.cache.kv_tables import PagedTables
from oasr_backend.cache.types import CacheConfig


def require(holds: bool, what: str) -> None:
    """Raises AssertionError unless an invariant holds."""
    if not holds:
        raise AssertionError(f"cache integrity: {what}")


@dataclass
class StreamKvState:
    """`start` frames at the head of blocks[0] are evicted; `visible` ones follow them.

    `position` is the absolute position of the first frame of the next chunk. A `sealed` stream
    has committed a short chunk and takes no more.
    """

    slot_id: int
    blocks: list[int] = field(default_factory=list)
    start: int = 0
    visible: int = 0
    position: int = 0
    has_room: bool = False
    was_prepared: bool = False
    sealed: bool = False

    @property
    def seqlen(self) -> int:
        return self.start + self.visible

    def missing_blocks(self, config: CacheConfig) -> int:
        """Blocks to take before a whole chunk fits behind the visible frames."""
        needed = -(-(self.seqlen + config.chunk_size) // config.block_size_frames)
        return max(0, needed - len(self.blocks))

    def drop_oldest(self, num_frames: int, block_size: int) -> list[int]:
        """Hides the oldest visible frames; returns the blocks that hold no other."""
        self.visible -= num_frames
        num_blocks, self.start = divmod(self.start + num_frames, block_size)
        dropped, self.blocks = self.blocks[:num_blocks], self.blocks[num_blocks:]
        return dropped

    def check_integrity(self, config: CacheConfig, tables: PagedTables) -> None:
        """Raises AssertionError unless the blocks hold the frames and `tables` says the same."""
        row, num_blocks = tables.host_table[self.slot_id], len(self.blocks)
        require(row[:num_blocks].tolist() == self.blocks, f"table row differs from {self}")
        require(not row[num_blocks:].any(), f"table row is longer than {self}")
        require(tables.host_starts[self.slot_id] == self.start, f"start differs from {self}")
        require(tables.host_seqlens[self.slot_id] == self.seqlen, f"length differs from {self}")
        require(0 <= self.start < config.block_size_frames, f"a whole block is hidden in {self}")
        require(self.seqlen <= num_blocks * config.block_size_frames, f"no room for {self}")
        require(num_blocks <= config.blocks_per_stream, f"over the share: {self}")
        require(not config.evicts or self.visible <= config.max_cache_frames, f"too long: {self}")
        require(not self.has_room or not self.missing_blocks(config), f"no room made: {self}")
