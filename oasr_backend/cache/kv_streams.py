"""Which blocks each stream holds, and how many of their frames it sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.kv_state import SlotKvStates, require
from oasr_backend.cache.kv_tables import PagedTables
from oasr_backend.cache.slot_pool import SlotMap, StreamSlotPool
from oasr_backend.cache.types import CacheConfig
from oasr_backend.errors import (
    ConfigError,
    PoolExhaustedError,
    StreamNotPreparedError,
    StreamStateError,
)
from oasr_backend.types import StreamId

IntArray = NDArray[np.int64]


class KvStreams:
    """Allocation, growth and eviction of every stream's blocks, on the host.

    Host integers decide everything. The device tensors in `tables` follow in one upload at prepare
    and commit, so that a stream's opening and closing do no device work of their own.
    Not thread-safe. A pool belongs to one instance.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: CacheConfig,
        pad_lanes: int = 0,
        *,
        slot_pool: StreamSlotPool | None = None,
    ) -> None:
        if pool.config != config:
            raise ConfigError(
                "the pool was made with another CacheConfig than the manager, so that blocks would "
                "be read in another shape; give both the same"
            )
        if pad_lanes < 0:
            raise ConfigError(f"pad_lanes={pad_lanes} must be >= 0; 0 for none")
        self.pool = pool
        self.config = config
        self._slots = SlotMap("attention cache", config.max_batch_size, slot_pool)
        num_rows = config.max_batch_size + pad_lanes
        self.tables = PagedTables(num_rows, config.max_blocks_per_seq, device=config.device)
        self._states = SlotKvStates(num_rows)
        self.pad_slots = list(range(config.max_batch_size, num_rows))
        if pad_lanes:
            self._fill_pad_lanes()

    def _fill_pad_lanes(self) -> None:
        """Lanes name scratch blocks only, at the length that every stream starts with."""
        scratch, lanes = self.pool.scratch_block_ids, len(self.pad_slots)
        if not scratch:
            raise ConfigError(
                f"pad_lanes={lanes} needs scratch blocks: BlockPool(config, scratch_blocks={lanes})"
            )
        self.tables.set_lanes(self.pad_slots, scratch, seqlen=self.config.prefilled_cache_frames)

    # Life of a stream

    def allocate_stream(self, stream_id: StreamId, slot_id: int | None = None) -> int:
        """Returns the slot. Raises StreamStateError (duplicate, bad slot), PoolExhaustedError."""
        slot = self._slots.bind(stream_id, slot_id)
        try:
            self._start(slot)
        except PoolExhaustedError:
            self._slots.release(stream_id)
            raise
        return slot

    def free_stream(self, stream_id: StreamId) -> None:
        self._release_blocks(self.slot_of(stream_id))
        self._slots.release(stream_id)

    def reset_stream(self, stream_id: StreamId) -> None:
        """Forgets what was heard and keeps the slot; the stream is as new."""
        slot = self.slot_of(stream_id)
        self._release_blocks(slot)
        self._start(slot)

    def slot_of(self, stream_id: StreamId) -> int:
        return self._slots.slot_of(stream_id)

    def slots_of(self, stream_ids: Sequence[StreamId]) -> IntArray:
        return np.array(self._slots.slots_of(stream_ids), dtype=np.int64)

    def _start(self, slot: int) -> None:
        """Hands out the zeroed window of a trained fixed span, when the config asks for one.

        Without one there is nothing to do: a slot without a stream is as new.
        """
        frames = self.config.prefilled_cache_frames
        if not frames:
            return
        blocks = self.pool.allocate(-(-frames // self.config.block_size_frames))
        self._states.begin(slot, num_blocks=len(blocks), position=frames)
        self.tables.set_lengths([slot], starts=[0], seqlens=[frames])
        self.tables.append([slot] * len(blocks), range(len(blocks)), blocks)
        self._flush(blocks)

    def _release_blocks(self, slot: int) -> None:
        blocks = self._blocks(slot)
        self.pool.free(blocks)
        self.tables.clear_row(slot, width=len(blocks))
        self._states.begin(slot, num_blocks=0, position=0)

    # One chunk

    def prepare_chunk(self, stream_id: StreamId) -> None:
        """`prepare_chunks_batched` of one."""
        self.prepare_chunks_batched([stream_id])

    def prepare_chunks_batched(self, stream_ids: Sequence[StreamId]) -> None:
        """Makes room for one chunk of each stream, or changes nothing.

        Frames come with the model's writes. A second call without a commit changes nothing.
        Raises UnknownStreamError, StreamStateError (repeated id, or a stream that has had its
        short last chunk), PoolExhaustedError.
        """
        slots_B = self._distinct_slots(stream_ids)
        missing_B = self._missing_blocks(slots_B)
        self._check_can_grow(stream_ids, slots_B, missing_B)
        new_blocks = self.pool.allocate(int(missing_B.sum()))
        self._hand_out(slots_B, missing_B, new_blocks)
        self._states.has_room[slots_B] = self._states.was_prepared[slots_B] = True
        self._rebase_positions(slots_B)
        self._flush(new_blocks)

    def commit_chunk_paged(self, stream_id: StreamId, chunk_frames: int) -> None:
        """`commit_chunks_paged_batched` of one."""
        self.commit_chunks_paged_batched([stream_id], chunk_frames)

    def commit_chunks_paged_batched(
        self,
        stream_ids: Sequence[StreamId],
        chunk_frames: int | Sequence[int],
        *,
        upload: bool = True,
    ) -> None:
        """Counts the frames that the model wrote, then evicts what is past the left context.

        `chunk_frames` is one number for all streams or one for each. Fewer than chunk_size seals
        a stream until its reset, so that its frames stay packed. Without `upload` the device tables
        follow at the next prepare, for a caller that does not read them in between. Raises
        StreamStateError and StreamNotPreparedError, and changes nothing then.
        """
        slots_B = self._distinct_slots(stream_ids)
        frames_B = self._frames_each(stream_ids, chunk_frames)
        self._check_commit(stream_ids, slots_B, frames_B)
        self._states.position[slots_B] += frames_B
        self._states.sealed[slots_B] = frames_B < self.config.chunk_size
        self._states.has_room[slots_B] = False
        keep = self.config.max_cache_frames if self.config.evicts else None
        self._advance(slots_B, frames_B, keep_frames=keep)
        if upload:
            self._flush([])

    def check_commit(self, stream_ids: Sequence[StreamId], frames: Sequence[int]) -> None:
        """Raises what a commit of these frames would."""
        self._check_commit(
            stream_ids, self.slots_of(stream_ids), self._frames_each(stream_ids, frames)
        )

    def evict_oldest_batched(
        self, stream_ids: Sequence[StreamId], keep_chunks: int | None = None
    ) -> None:
        """Shrinks histories to `keep_chunks` chunks (default num_left_chunks); a commit does it."""
        keep = self.config.num_left_chunks if keep_chunks is None else keep_chunks
        slots_B = self._distinct_slots(stream_ids)
        keep_frames = keep * self.config.chunk_size if keep >= 0 else None
        self._advance(slots_B, np.zeros_like(slots_B), keep_frames=keep_frames)
        self._flush([])

    # What streams hold

    def cached_frames(self, stream_ids: Sequence[StreamId]) -> int:
        """Most visible frames among the streams; a chunk's model call takes it as `cache_t1`."""
        return int(self._visible(self.slots_of(stream_ids)).max(initial=0))

    def position_offsets(self, stream_ids: Sequence[StreamId]) -> list[int]:
        """Absolute position of each stream's first new frame.

        The frames heard so far (a prefilled window counts), until a chunk would pass
        position_limit_frames; then prepare puts the oldest visible frame at 0.
        """
        positions: list[int] = self._states.position[self.slots_of(stream_ids)].tolist()
        return positions

    def first_key_positions(self, slots_B: IntArray) -> IntArray:
        """Absolute position of the oldest visible frame of each slot."""
        return self._states.position[slots_B] - self._visible(slots_B)

    def blocks_of(self, stream_id: StreamId) -> list[int]:
        """Physical blocks, oldest first."""
        return self._blocks(self.slot_of(stream_id))

    def at_capacity(self, stream_id: StreamId) -> bool:
        """Whether the next prepare must fail. Never when history is bounded."""
        slot = self.slot_of(stream_id)
        if self.config.evicts:
            return False
        missing = int(self._missing_blocks(np.array([slot]))[0])
        over_share = self._states.num_blocks[slot] + missing > self.config.blocks_per_stream
        return bool(over_share) or missing > self.pool.num_free_blocks

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free, scratch or held once."""
        self.pool.check_integrity()
        self.tables.flush()
        self.tables.check_integrity()
        held = [block for slot in self._slots.values() for block in self._blocks(slot)]
        require(not set(held) & set(self.pool.free_block_ids()), "a held block is free")
        twice = [block for block, count in Counter(held).items() if count > 1]
        require(not twice, f"blocks {twice} are held twice")
        require(
            len(held) + self.pool.num_free_blocks == self.pool.num_blocks,
            f"{len(held)} held + {self.pool.num_free_blocks} free != {self.pool.num_blocks}",
        )
        taken = self._slots.values()
        for slot in taken:
            self._states.check_integrity(slot, self.config, self.tables)
        free = set(range(self.config.max_batch_size)).difference(taken)
        self._states.check_new(sorted(free), self.tables)

    # Steps of the above

    def _blocks(self, slot: int) -> list[int]:
        blocks: list[int] = self.tables.host_table[slot, : self._states.num_blocks[slot]].tolist()
        return blocks

    def _visible(self, slots_B: IntArray) -> IntArray:
        visible_B: IntArray = self.tables.host_seqlens[slots_B] - self.tables.host_starts[slots_B]
        return visible_B

    def _distinct_slots(self, stream_ids: Sequence[StreamId]) -> IntArray:
        slots_B = self.slots_of(stream_ids)
        if len(set(stream_ids)) != len(stream_ids):
            raise StreamStateError(f"a stream is named twice in {list(stream_ids)}")
        return slots_B

    def _missing_blocks(self, slots_B: IntArray) -> IntArray:
        """Blocks to take before a whole chunk fits behind the frames of each slot."""
        frames_B = self.tables.host_seqlens[slots_B] + self.config.chunk_size
        needed_B = -(-frames_B // self.config.block_size_frames)
        return np.maximum(0, needed_B - self._states.num_blocks[slots_B])

    def _check_can_grow(
        self, stream_ids: Sequence[StreamId], slots_B: IntArray, missing_B: IntArray
    ) -> None:
        sealed_B = self._states.sealed[slots_B]
        if sealed_B.any():
            raise StreamStateError(
                f"stream {stream_ids[int(sealed_B.argmax())]!r} has had a chunk shorter than "
                f"chunk_size={self.config.chunk_size}, its last: reset or free it"
            )
        share, held_B = self.config.blocks_per_stream, self._states.num_blocks[slots_B]
        is_over_B = held_B + missing_B > share
        if is_over_B.any():
            row = int(is_over_B.argmax())
            what = f"history of stream {stream_ids[row]!r} (finish it, or set num_left_chunks)"
            free = share - int(held_B[row])
            raise PoolExhaustedError(what, requested=int(missing_B[row]), free=free, total=share)

    def _hand_out(self, slots_B: IntArray, counts_B: IntArray, new_blocks: list[int]) -> None:
        """Names `counts_B` of the blocks behind those that each slot has."""
        first_N = np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        held_N = np.repeat(self._states.num_blocks[slots_B], counts_B)
        columns_N = held_N + np.arange(len(new_blocks)) - first_N
        self.tables.append(np.repeat(slots_B, counts_B), columns_N, new_blocks)
        self._states.num_blocks[slots_B] += counts_B

    def _rebase_positions(self, slots_B: IntArray) -> None:
        if not self.config.evicts:
            return
        position = self._states.position
        limit = self.config.position_limit_frames - self.config.chunk_size
        far_N = slots_B[position[slots_B] > limit]
        position[far_N] = self._visible(far_N)

    def _frames_each(
        self, stream_ids: Sequence[StreamId], chunk_frames: int | Sequence[int]
    ) -> IntArray:
        counts = np.asarray(chunk_frames)
        if counts.size and counts.dtype.kind not in "iu":
            raise StreamStateError(
                f"chunk_frames={chunk_frames!r} counts frames: give an integer, or one for each "
                "stream"
            )
        if counts.ndim == 0:
            return np.full(len(stream_ids), counts, dtype=np.int64)
        if counts.shape != (len(stream_ids),):
            raise StreamStateError(
                f"{counts.size} frame counts for {len(stream_ids)} streams: give one for each"
            )
        return counts.astype(np.int64)

    def _check_commit(
        self, stream_ids: Sequence[StreamId], slots_B: IntArray, frames_B: IntArray
    ) -> None:
        has_room_B = self._states.has_room[slots_B]
        if not has_room_B.all():
            stream_id = stream_ids[int(has_room_B.argmin())]
            raise StreamNotPreparedError(
                f"commit for stream {stream_id!r} without prepare_chunk: call it before every chunk"
            )
        fits_B = (frames_B >= 0) & (frames_B <= self.config.chunk_size)
        if not fits_B.all():
            row = int(fits_B.argmin())
            raise StreamStateError(
                f"commit of {frames_B[row]} frames for stream {stream_ids[row]!r}: a chunk has 0 "
                f"to chunk_size={self.config.chunk_size}"
            )

    def _advance(self, slots_B: IntArray, added_B: IntArray, *, keep_frames: int | None) -> None:
        """Counts the added frames and hides the oldest beyond `keep_frames` (None: none)."""
        starts_B: IntArray = self.tables.host_starts[slots_B].astype(np.int64)
        seqlens_B = self.tables.host_seqlens[slots_B] + added_B
        if keep_frames is not None:
            starts_B = np.maximum(starts_B, seqlens_B - keep_frames)
        dropped_B, starts_B = np.divmod(starts_B, self.config.block_size_frames)
        self._drop_blocks(slots_B, dropped_B)
        seqlens_B = seqlens_B - dropped_B * self.config.block_size_frames
        self.tables.set_lengths(slots_B, starts=starts_B, seqlens=seqlens_B)

    def _drop_blocks(self, slots_B: IntArray, dropped_B: IntArray) -> None:
        """Gives back the oldest blocks, with one shift for each number of them."""
        width = int(self._states.num_blocks[slots_B].max(initial=0))
        for num_dropped in range(1, 1 + int(dropped_B.max(initial=0))):
            slots_N = slots_B[dropped_B == num_dropped]
            self.pool.free(self.tables.host_table[slots_N, :num_dropped].ravel().tolist())
            self.tables.drop_head(slots_N, num_dropped, width=width)
        self._states.num_blocks[slots_B] -= dropped_B

    def _flush(self, new_blocks: Sequence[int]) -> None:
        index_N = self.tables.flush(new_blocks)
        if new_blocks:
            self.pool.zero_blocks(index_N)
