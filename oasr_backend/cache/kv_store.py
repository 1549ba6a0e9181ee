"""The K/V histories of all streams, one row a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
from torch import Tensor

from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.kv_rows import BoolArray, KvRows, require
from oasr_backend.cache.kv_tables import IntArray, PagedTables
from oasr_backend.cache.kv_views import StepCaches
from oasr_backend.cache.types import CacheConfig
from oasr_backend.errors import ConfigError, PoolExhaustedError


class KvStore:
    """The blocks of a pool, dealt out to rows that are named by slot.

    The host decides everything. The device tables follow in one upload at prepare and commit, so
    that a stream's closing does no device work of its own.

    The caller is trusted: it names distinct slots that it has opened, prepares before it commits,
    and prepares nothing after a short chunk. `AttentionCacheManager` checks that, by stream id.
    Not thread-safe. A pool belongs to one store.
    """

    def __init__(
        self, config: CacheConfig, *, pad_lanes: int = 0, pool: BlockPool | None = None
    ) -> None:
        """Without a `pool` it makes its own, with scratch blocks for the lanes."""
        if pad_lanes < 0:
            raise ConfigError(f"pad_lanes={pad_lanes} must be >= 0; 0 for none")
        if pool is None:
            pool = BlockPool(
                config,
                scratch_blocks=pad_lanes * (config.peak_blocks or 1),
                reuses_first=config.device.type == "cpu",
            )
        if pool.config != config:
            raise ConfigError(
                "the pool was made with another CacheConfig than its user, so that blocks would "
                "be read in another shape; give both the same"
            )
        self.pool, self.config = pool, config
        num_rows = config.max_batch_size + pad_lanes
        self.tables = PagedTables(num_rows, config.max_blocks_per_seq, device=config.device)
        self.rows = KvRows(config, self.tables, num_rows)
        self.pad_slots = list(range(config.max_batch_size, num_rows))
        if pad_lanes:
            self._fill_pad_lanes()

    @property
    def pad_slot(self) -> int:
        """The lane for rows that pad a step. Raises ConfigError when there is none."""
        if not self.pad_slots:
            raise ConfigError("the K/V store has no padding lane: make it with pad_lanes=1")
        return self.pad_slots[0]

    def _fill_pad_lanes(self) -> None:
        """Lanes name scratch blocks only, at the length that every stream starts with."""
        scratch, lanes = self.pool.scratch_block_ids, len(self.pad_slots)
        if not scratch:
            raise ConfigError(
                f"pad_lanes={lanes} needs scratch blocks: BlockPool(config, scratch_blocks={lanes})"
            )
        self.tables.set_lanes(self.pad_slots, scratch, seqlen=self.config.prefilled_cache_frames)

    # Life of a stream

    def open(self, slot: int) -> None:
        """Hands out the zeroed window of a trained span, when the config asks for one.

        Without one there is nothing to do: a closed slot is as new. Raises PoolExhaustedError.
        """
        frames = self.config.prefilled_cache_frames
        if frames:
            blocks_N = self.pool.take(-(-frames // self.config.block_size_frames))
            self.rows.begin(slot, blocks_N, frames=frames)
            self._flush(blocks_N)

    def close(self, slot: int) -> None:
        """Gives all blocks back and forgets the row."""
        self.pool.free(self.rows.clear(slot))

    def reset(self, slot: int) -> None:
        """Forgets what was heard; the row is as new."""
        self.close(slot)
        self.open(slot)

    # One chunk

    def prepare(self, slots_B: IntArray) -> None:
        """Makes room for one chunk behind each row, or changes nothing.

        A second call without a commit changes nothing. Raises PoolExhaustedError.
        """
        missing_B = self.rows.missing_blocks(slots_B)
        if not self.config.evicts:
            self._check_share(slots_B, missing_B)
        blocks_N = self.pool.take(int(missing_B.sum()))
        self.rows.append(slots_B, missing_B, blocks_N)
        if self.config.evicts:
            self.rows.rebase_positions(slots_B)
        self._flush(blocks_N)

    def commit(self, slots_B: IntArray, frames_B: IntArray, *, upload: bool = True) -> None:
        """Counts the frames that the model wrote, then evicts what is past the bounded history.

        Without `upload` the device tables follow at the next prepare, for a caller that does not
        read them in between.
        """
        self.rows.position[slots_B] += frames_B
        keep_frames = self.config.max_cache_frames
        self.pool.free(self.rows.advance(slots_B, frames_B, keep_frames=keep_frames))
        if upload:
            self._flush()

    def evict(self, slots_B: IntArray, keep_frames: int) -> None:
        """Shrinks histories to `keep_frames` (negative: leaves them); a commit does it too."""
        self.pool.free(self.rows.advance(slots_B, 0, keep_frames=keep_frames))
        self._flush()

    def _check_share(self, slots_B: IntArray, missing_B: IntArray) -> None:
        """An unlimited history that outgrew its table row would run into the next one."""
        over_B = self.rows.is_over_share(slots_B, missing_B)
        if over_B.any():
            slot, share = int(slots_B[over_B.argmax()]), self.config.blocks_per_stream
            raise PoolExhaustedError(
                f"history of slot {slot} (close it, or set num_left_chunks)",
                requested=int(missing_B[over_B.argmax()]),
                free=share - int(self.rows.num_blocks[slot]),
                total=share,
            )

    def _flush(self, new_blocks_N: IntArray | None = None) -> None:
        if new_blocks_N is None or not new_blocks_N.size:
            self.tables.flush()
        else:
            self.pool.zero_blocks(self.tables.flush(new_blocks_N))

    # What rows hold

    def history_frames(self, slots_B: IntArray) -> int:
        """Most visible frames of the past among the rows."""
        return int(self.rows.visible_frames(slots_B).max(initial=0))

    def position_offsets(self, slots_B: IntArray) -> IntArray:
        """Absolute position of each row's first new frame.

        The frames heard so far (a prefilled window counts), until a chunk would pass
        position_limit_frames; then prepare puts the oldest visible frame at 0.
        """
        return self.rows.position[slots_B]

    def first_key_positions(self, slots_B: IntArray) -> IntArray:
        """Absolute position of the oldest visible frame of each row."""
        return self.rows.position[slots_B] - self.rows.visible_frames(slots_B)

    def blocks_of(self, slot: int) -> list[int]:
        """Physical blocks of one row, oldest first."""
        blocks: list[int] = self.rows.blocks_of(slot).tolist()
        return blocks

    def at_capacity(self, slots_B: IntArray) -> BoolArray:
        """Whether a prepare of the row alone must fail. Never when history is bounded."""
        if self.config.evicts:
            return np.zeros(len(slots_B), dtype=np.bool_)
        missing_B = self.rows.missing_blocks(slots_B)
        no_block_B: BoolArray = missing_B > self.pool.num_free_blocks
        return self.rows.is_over_share(slots_B, missing_B) | no_block_B

    # What the model reads and writes

    def views(
        self, slots_W: Tensor, *, num_new_W: Tensor | None, history_frames: int
    ) -> StepCaches:
        """One cache a layer for a step of these rows; tensors only, no wait for the device.

        `history_frames` bounds every row's visible past from above. `num_new_W` tells each row's
        real new frames, a whole chunk when None. All layers share one layout.
        """
        rows = self.tables.rows(slots_W, self.config.block_size_frames)
        return StepCaches(self.pool, rows, num_new_B=num_new_W, history_frames=history_frames)

    # Invariants

    def check_integrity(self, open_slots: Collection[int]) -> None:
        """Raises AssertionError unless a block is free, scratch or held once by an open slot."""
        self.pool.check_integrity()
        self.tables.flush()
        self.rows.check_integrity(open_slots)
        held = [block for slot in open_slots for block in self.blocks_of(slot)]
        require(not set(held) & set(self.pool.free_block_ids()), "a held block is free")
        twice = [block for block, count in Counter(held).items() if count > 1]
        require(not twice, f"blocks {twice} are held twice")
        num_free, total = self.pool.num_free_blocks, self.pool.num_blocks
        require(len(held) + num_free == total, f"{len(held)} held + {num_free} free != {total}")
