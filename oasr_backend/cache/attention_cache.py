"""The attention caches by stream id, as the design document names them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.chunk_rules import ChunkRules, frames_each
from oasr_backend.cache.dense import (
    check_dense_chunk,
    read_dense_layer,
    read_dense_stack,
    write_dense_chunk,
)
from oasr_backend.cache.kv_store import KvStore
from oasr_backend.cache.kv_tables import IntArray
from oasr_backend.cache.kv_views import layer_caches, step_layout
from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.cache.slot_map import SlotMap
from oasr_backend.cache.slot_pool import StreamSlotPool
from oasr_backend.cache.slot_views import SlotIds, history_bound, rows_of_slots
from oasr_backend.cache.types import CacheConfig
from oasr_backend.errors import PoolExhaustedError, StreamNotPreparedError
from oasr_backend.types import StreamId


class AttentionCacheManager:
    """A `KvStore` whose rows are named by stream id, and whose callers are checked.

    Paged: prepare, let the model write, commit. Dense: `commit` copies what the model returns.
    Both may serve one stream by turns, and see the same history. Not thread-safe.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: CacheConfig,
        pad_lanes: int = 0,
        *,
        slot_pool: StreamSlotPool | None = None,
    ) -> None:
        self.store = KvStore(config, pad_lanes=pad_lanes, pool=pool)
        self.pool, self.config = pool, config
        self.pad_slots = self.store.pad_slots
        self._slots = SlotMap("attention cache", config.max_batch_size, slot_pool)
        self._rules = ChunkRules(self.store)

    # Life of a stream

    def allocate_stream(self, stream_id: StreamId, slot_id: int | None = None) -> int:
        """Returns the slot. Raises StreamStateError (duplicate, bad slot), PoolExhaustedError."""
        slot = self._slots.bind(stream_id, slot_id)
        try:
            self.store.open(slot)
        except PoolExhaustedError:
            self._slots.release(stream_id)
            raise
        return slot

    def free_stream(self, stream_id: StreamId) -> None:
        slot = self.slot_of(stream_id)
        self._rules.begin(slot)
        self.store.close(slot)
        self._slots.release(stream_id)

    def reset_stream(self, stream_id: StreamId) -> None:
        """Forgets what was heard and keeps the slot; the stream is as new."""
        slot = self.slot_of(stream_id)
        self._rules.begin(slot)
        self.store.reset(slot)

    def slot_of(self, stream_id: StreamId) -> int:
        return self._slots.slot_of(stream_id)

    def slots_of(self, stream_ids: Sequence[StreamId]) -> IntArray:
        return self._slots.slots_of(stream_ids)

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
        slots_B = self._slots.distinct_slots(stream_ids)
        self._rules.check_prepare(stream_ids, slots_B)
        self.store.prepare(slots_B)
        self._rules.note_prepare(slots_B)

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

        `chunk_frames` is one number for all streams or one for each; fewer than chunk_size seals
        a stream until its reset. `upload` is as for `KvStore.commit`. Raises StreamStateError and
        StreamNotPreparedError, and changes nothing then.
        """
        slots_B = self._slots.distinct_slots(stream_ids)
        frames_B = frames_each(stream_ids, chunk_frames)
        self._rules.check_commit(stream_ids, slots_B, frames_B)
        self.store.commit(slots_B, frames_B, upload=upload)
        self._rules.note_commit(slots_B, frames_B)

    def check_commit(self, stream_ids: Sequence[StreamId], frames: Sequence[int]) -> None:
        """Raises what a commit of these frames would."""
        slots_B = self.slots_of(stream_ids)
        self._rules.check_commit(stream_ids, slots_B, frames_each(stream_ids, frames))

    def evict_oldest_batched(
        self, stream_ids: Sequence[StreamId], keep_chunks: int | None = None
    ) -> None:
        """Shrinks histories to `keep_chunks` chunks (default: the bound, as a commit does)."""
        keep_frames = self.config.max_cache_frames
        if keep_chunks is not None:
            keep_frames = keep_chunks * self.config.chunk_size
        self.store.evict(self._slots.distinct_slots(stream_ids), keep_frames)

    # What streams hold

    def cached_frames(self, stream_ids: Sequence[StreamId]) -> int:
        """Most visible frames among the streams; a chunk's model call takes it as `cache_t1`."""
        return self.store.history_frames(self.slots_of(stream_ids))

    def position_offsets(self, stream_ids: Sequence[StreamId]) -> list[int]:
        """`KvStore.position_offsets`: the absolute position of each stream's first new frame."""
        positions: list[int] = self.store.position_offsets(self.slots_of(stream_ids)).tolist()
        return positions

    def at_capacity(self, stream_id: StreamId) -> bool:
        """Whether the next prepare must fail. Never when history is bounded."""
        return bool(self.store.at_capacity(self.slots_of([stream_id]))[0])

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free, scratch or held once."""
        self.store.check_integrity(self._slots.values())
        self._rules.check_integrity(self._slots.values())

    # Paged access

    def get_paged_caches(self, stream_id: StreamId) -> list[PagedKVCache]:
        """One cache a layer for this chunk, over persistent rows. Raises StreamNotPreparedError."""
        slot = self.slot_of(stream_id)
        if not self._rules.has_room[slot]:
            raise StreamNotPreparedError(
                f"stream {stream_id!r} has no room for a chunk: call prepare_chunk before each"
            )
        rows = self.store.tables.row_views(slot, self.config.block_size_frames)
        return layer_caches(self.pool, rows, self.cached_frames([stream_id]))

    def get_paged_state_views(self, stream_id: StreamId) -> tuple[Tensor, Tensor]:
        """Views of the stream's (1, W) block table and (1,) lengths; both follow later commits.

        Where some `cache_starts` are not 0 (blocks wider than chunks, a trained window) the lengths
        include hidden frames: pass `get_cache_starts_view` to PagedKVCache too.
        """
        slot = self.slot_of(stream_id)
        if not self._rules.was_prepared[slot]:
            raise StreamNotPreparedError(
                f"stream {stream_id!r} has no paged cache yet: call prepare_chunk first"
            )
        rows = self.store.tables.row_views(slot, self.config.block_size_frames)
        return rows.block_table, rows.cache_seqlens

    def get_cache_starts_view(self, stream_id: StreamId) -> Tensor:
        """View (1,): evicted frames at the head of the stream's first block."""
        slot = self.slot_of(stream_id)
        return self.store.tables.cache_starts[slot : slot + 1]

    def get_batched_paged_caches(
        self,
        slot_ids: SlotIds,
        *,
        chunk_frames: int | None = None,
        num_new_B: Tensor | None = None,
        history_frames: int | None = None,
    ) -> tuple[list[PagedKVCache], Tensor, Tensor]:
        """One cache a layer, with the (B, W) block table and (B,) lengths that they share.

        Padding lanes (`pad_slots`) are slots too. With `chunk_frames` the layout is built now, else
        by the first write. `history_frames` bounds the rows' visible frames from above (see
        `cached_frames`); when None: the most that the host knows of the slots, or of any stream
        when they are a tensor.
        """
        rows = rows_of_slots(self.store, slot_ids)
        history = history_bound(self.store, slot_ids) if history_frames is None else history_frames
        layout = None
        if chunk_frames is not None:
            layout = step_layout(
                rows, self.config, chunk_frames=chunk_frames, num_new_B=num_new_B,
                history_frames=history,
            )  # fmt: skip
        return layer_caches(self.pool, rows, history, layout), rows.block_table, rows.cache_seqlens

    # Dense access

    def commit(self, stream_id: StreamId, new_kv: Tensor) -> None:
        """Appends one chunk, K and V packed: (layers, n_kv_head, T, 2 * head_dim)."""
        check_dense_chunk(new_kv, self.config)
        self.prepare_chunk(stream_id)
        write_dense_chunk(new_kv, self.get_paged_caches(stream_id))
        self.commit_chunk_paged(stream_id, new_kv.shape[2])

    def get_stacked_cache(self, stream_id: StreamId) -> Tensor:
        """Fresh (layers, n_kv_head, visible frames, 2 * head_dim); (0, 0, 0, 0) without history."""
        return read_dense_stack(self.store, self.slot_of(stream_id))

    def get_cache_view(self, stream_id: StreamId, layer: int) -> Tensor:
        """Fresh (1, n_kv_head, visible frames, 2 * head_dim) of one layer."""
        return read_dense_layer(self.store, self.slot_of(stream_id), layer)
