"""Which blocks each stream holds, and how many of their frames it sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.kv_state import StreamKvState, require
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
        self.pool = pool
        self.config = config
        self._slots = SlotMap("attention cache", config.max_batch_size, slot_pool)
        self._streams: dict[StreamId, StreamKvState] = {}
        self.tables = PagedTables(
            config.max_batch_size + pad_lanes, config.max_blocks_per_seq, device=config.device
        )
        self.pad_slots = list(range(config.max_batch_size, config.max_batch_size + pad_lanes))
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
        state = StreamKvState(slot)
        try:
            self._start(state)
        except PoolExhaustedError:
            self._slots.release(stream_id)
            raise
        self._streams[stream_id] = state
        return slot

    def free_stream(self, stream_id: StreamId) -> None:
        state = self._state(stream_id)
        self._release_blocks(state)
        del self._streams[stream_id]
        self._slots.release(stream_id)

    def reset_stream(self, stream_id: StreamId) -> None:
        """Forgets what was heard and keeps the slot; the stream is as new."""
        state = self._state(stream_id)
        self._release_blocks(state)
        self._streams[stream_id] = fresh = StreamKvState(state.slot_id)
        self._start(fresh)

    def slot_of(self, stream_id: StreamId) -> int:
        return self._slots.slot_of(stream_id)

    def _start(self, state: StreamKvState) -> None:
        """Hands out the zeroed window of a trained fixed span, when the config asks for one."""
        frames = self.config.prefilled_cache_frames
        state.blocks = self.pool.allocate(-(-frames // self.config.block_size_frames))
        state.visible = state.position = frames
        columns = range(len(state.blocks))
        self.tables.append([state.slot_id] * len(columns), columns, state.blocks)
        self._set_lengths([state])
        if state.blocks:
            self._flush(state.blocks)

    def _release_blocks(self, state: StreamKvState) -> None:
        self.pool.free(state.blocks)
        width = len(state.blocks)
        self.tables.drop_head([state.slot_id], width, width=width)
        self.tables.set_lengths([state.slot_id], starts=[0], seqlens=[0])
        state.blocks = []

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
        states = self._distinct_states(stream_ids)
        for stream_id, state in zip(stream_ids, states, strict=True):
            self._check_can_grow(stream_id, state)
        counts = [state.missing_blocks(self.config) for state in states]
        new_blocks = self.pool.allocate(sum(counts))
        self._hand_out(states, counts, new_blocks)
        for state in states:
            state.has_room = state.was_prepared = True
            self._rebase_position(state)
        self._flush(new_blocks)

    def commit_chunk_paged(self, stream_id: StreamId, chunk_frames: int) -> None:
        """`commit_chunks_paged_batched` of one."""
        self.commit_chunks_paged_batched([stream_id], chunk_frames)

    def commit_chunks_paged_batched(
        self, stream_ids: Sequence[StreamId], chunk_frames: int | Sequence[int]
    ) -> None:
        """Counts the frames that the model wrote, then evicts what is past the left context.

        `chunk_frames` is one number for all streams or one for each. Fewer than chunk_size seals
        a stream until its reset, so that its frames stay packed. Raises StreamStateError and
        StreamNotPreparedError, and changes nothing then.
        """
        states = self._distinct_states(stream_ids)
        frames = self._frames_each(states, chunk_frames)
        self.check_commit(stream_ids, frames)
        for state, count in zip(states, frames, strict=True):
            state.visible += count
            state.position += count
            state.sealed = count < self.config.chunk_size
            state.has_room = False
        self._evict(states, self.config.max_cache_frames if self.config.evicts else None)

    def check_commit(self, stream_ids: Sequence[StreamId], frames: Sequence[int]) -> None:
        """Raises what a commit of these frames would."""
        for stream_id, count in zip(stream_ids, frames, strict=True):
            if not self._state(stream_id).has_room:
                raise StreamNotPreparedError(
                    f"commit for stream {stream_id!r} without prepare_chunk: call it before "
                    "every chunk"
                )
            if not 0 <= count <= self.config.chunk_size:
                raise StreamStateError(
                    f"commit of {count} frames for stream {stream_id!r}: a chunk has 0 to "
                    f"chunk_size={self.config.chunk_size}"
                )

    def evict_oldest_batched(
        self, stream_ids: Sequence[StreamId], keep_chunks: int | None = None
    ) -> None:
        """Shrinks histories to `keep_chunks` chunks (default num_left_chunks); a commit does it."""
        keep = self.config.num_left_chunks if keep_chunks is None else keep_chunks
        states = self._distinct_states(stream_ids)
        self._evict(states, keep * self.config.chunk_size if keep >= 0 else None)

    # What streams hold

    def cached_frames(self, stream_ids: Sequence[StreamId]) -> int:
        """Most visible frames among the streams; a chunk's model call takes it as `cache_t1`."""
        return max((self._state(stream_id).visible for stream_id in stream_ids), default=0)

    def position_offsets(self, stream_ids: Sequence[StreamId]) -> list[int]:
        """Absolute position of each stream's first new frame.

        The frames heard so far (a prefilled window counts), until a chunk would pass
        position_limit_frames; then prepare puts the oldest visible frame at 0.
        """
        return [self._state(stream_id).position for stream_id in stream_ids]

    def at_capacity(self, stream_id: StreamId) -> bool:
        """Whether the next prepare must fail. Never when history is bounded."""
        state = self._state(stream_id)
        if self.config.evicts:
            return False
        missing = state.missing_blocks(self.config)
        over_share = len(state.blocks) + missing > self.config.blocks_per_stream
        return over_share or missing > self.pool.num_free_blocks

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free, scratch or held once."""
        self.pool.check_integrity()
        self.tables.flush()
        self.tables.check_integrity()
        held = [block for state in self._streams.values() for block in state.blocks]
        require(not set(held) & set(self.pool.free_block_ids()), "a held block is free")
        twice = [block for block, count in Counter(held).items() if count > 1]
        require(not twice, f"blocks {twice} are held twice")
        require(
            len(held) + self.pool.num_free_blocks == self.pool.num_blocks,
            f"{len(held)} held + {self.pool.num_free_blocks} free != {self.pool.num_blocks}",
        )
        require(len(self._slots) == len(self._streams), "streams and slots differ")
        for stream_id, state in self._streams.items():
            require(self.slot_of(stream_id) == state.slot_id, f"slot of {stream_id!r}: {state}")
            state.check_integrity(self.config, self.tables)

    # Steps of the above

    def _state(self, stream_id: StreamId) -> StreamKvState:
        try:
            return self._streams[stream_id]
        except KeyError:
            self._slots.slot_of(stream_id)
            raise

    def _distinct_states(self, stream_ids: Sequence[StreamId]) -> list[StreamKvState]:
        states = [self._state(stream_id) for stream_id in stream_ids]
        if len(set(stream_ids)) != len(stream_ids):
            raise StreamStateError(f"a stream is named twice in {list(stream_ids)}")
        return states

    def _check_can_grow(self, stream_id: StreamId, state: StreamKvState) -> None:
        if state.sealed:
            raise StreamStateError(
                f"stream {stream_id!r} has had a chunk shorter than "
                f"chunk_size={self.config.chunk_size}, its last: reset or free it"
            )
        held, share = len(state.blocks), self.config.blocks_per_stream
        missing = state.missing_blocks(self.config)
        if held + missing > share:
            what = f"history of stream {stream_id!r} (finish it, or set num_left_chunks)"
            raise PoolExhaustedError(what, requested=missing, free=share - held, total=share)

    def _hand_out(
        self, states: list[StreamKvState], counts: list[int], new_blocks: list[int]
    ) -> None:
        slots: list[int] = []
        columns: list[int] = []
        for state, count in zip(states, counts, strict=True):
            for _ in range(count):
                slots.append(state.slot_id)
                columns.append(len(state.blocks))
                state.blocks.append(new_blocks[len(slots) - 1])
        self.tables.append(slots, columns, new_blocks)

    def _rebase_position(self, state: StreamKvState) -> None:
        limit = self.config.position_limit_frames
        if self.config.evicts and state.position + self.config.chunk_size > limit:
            state.position = state.visible

    def _frames_each(
        self, states: list[StreamKvState], chunk_frames: int | Sequence[int]
    ) -> list[int]:
        if isinstance(chunk_frames, int):
            return [chunk_frames] * len(states)
        if len(chunk_frames) != len(states):
            raise StreamStateError(
                f"{len(chunk_frames)} frame counts for {len(states)} streams: give one for each"
            )
        return list(chunk_frames)

    def _evict(self, states: list[StreamKvState], keep_frames: int | None) -> None:
        """Host first, then one shift for each number of blocks dropped, then one upload."""
        shifts: dict[int, list[int]] = {}
        width = max((len(state.blocks) for state in states), default=0)
        freed: list[int] = []
        for state in states:
            surplus = 0 if keep_frames is None else max(0, state.visible - keep_frames)
            dropped = state.drop_oldest(surplus, self.config.block_size_frames)
            freed += dropped
            if dropped:
                shifts.setdefault(len(dropped), []).append(state.slot_id)
        self.pool.free(freed)
        for num_dropped, slots in shifts.items():
            self.tables.drop_head(slots, num_dropped, width=width)
        self._set_lengths(states)
        self._flush([])

    def _set_lengths(self, states: list[StreamKvState]) -> None:
        self.tables.set_lengths(
            [state.slot_id for state in states],
            starts=[state.start for state in states],
            seqlens=[state.seqlen for state in states],
        )

    def _flush(self, new_blocks: Sequence[int]) -> None:
        index_N = self.tables.flush(new_blocks)
        if new_blocks:
            self.pool.zero_blocks(index_N)
