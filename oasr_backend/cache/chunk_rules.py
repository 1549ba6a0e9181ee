"""What the attention cache's callers by stream id may get wrong, found before anything changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oasr_backend.cache.kv_rows import BoolArray, require
from oasr_backend.cache.kv_store import KvStore
from oasr_backend.cache.kv_tables import IntArray
from oasr_backend.errors import PoolExhaustedError, StreamNotPreparedError, StreamStateError
from oasr_backend.types import StreamId


class ChunkRules:
    """Prepare before each commit, and no chunk after a short one.

    Flags by slot, which only `AttentionCacheManager` keeps: `has_room` between a prepare and its
    commit, `was_prepared` from the first prepare on, `is_sealed` after a short chunk.
    """

    def __init__(self, store: KvStore) -> None:
        self._store = store
        num_slots = store.config.max_batch_size
        self.has_room: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self.was_prepared: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self.is_sealed: BoolArray = np.zeros(num_slots, dtype=np.bool_)

    def begin(self, slot: int) -> None:
        self.has_room[slot] = self.was_prepared[slot] = self.is_sealed[slot] = False

    def note_prepare(self, slots_B: IntArray) -> None:
        self.has_room[slots_B] = self.was_prepared[slots_B] = True

    def note_commit(self, slots_B: IntArray, frames_B: IntArray) -> None:
        self.is_sealed[slots_B] = frames_B < self._store.config.chunk_size
        self.has_room[slots_B] = False

    def check_prepare(self, stream_ids: Sequence[StreamId], slots_B: IntArray) -> None:
        """Raises StreamStateError (sealed), PoolExhaustedError (a history past its share)."""
        is_sealed_B = self.is_sealed[slots_B]
        if is_sealed_B.any():
            raise StreamStateError(
                f"stream {stream_ids[int(is_sealed_B.argmax())]!r} has had a chunk shorter than "
                f"chunk_size={self._store.config.chunk_size}, its last: reset or free it"
            )
        rows, share = self._store.rows, self._store.config.blocks_per_stream
        missing_B = rows.missing_blocks(slots_B)
        is_over_B = rows.is_over_share(slots_B, missing_B)
        if is_over_B.any():
            row = int(is_over_B.argmax())
            what = f"history of stream {stream_ids[row]!r} (finish it, or set num_left_chunks)"
            free = share - int(rows.num_blocks[slots_B[row]])
            raise PoolExhaustedError(what, requested=int(missing_B[row]), free=free, total=share)

    def check_commit(
        self, stream_ids: Sequence[StreamId], slots_B: IntArray, frames_B: IntArray
    ) -> None:
        """Raises StreamNotPreparedError, StreamStateError (more frames than a chunk's)."""
        has_room_B = self.has_room[slots_B]
        if not has_room_B.all():
            stream_id = stream_ids[int(has_room_B.argmin())]
            raise StreamNotPreparedError(
                f"commit for stream {stream_id!r} without prepare_chunk: call it before every chunk"
            )
        chunk_size = self._store.config.chunk_size
        fits_B = (frames_B >= 0) & (frames_B <= chunk_size)
        if not fits_B.all():
            row = int(fits_B.argmin())
            raise StreamStateError(
                f"commit of {frames_B[row]} frames for stream {stream_ids[row]!r}: a chunk has 0 "
                f"to chunk_size={chunk_size}"
            )

    def check_integrity(self, open_slots: Sequence[int]) -> None:
        """Raises AssertionError unless prepared rows have room and the others are as new."""
        rows, config = self._store.rows, self._store.config
        for slot in open_slots:
            end = int(rows.num_blocks[slot]) * config.block_size_frames
            room = end - int(self._store.tables.host_seqlens[slot])
            require(
                not self.has_room[slot] or room >= config.chunk_size,
                f"slot {slot} was prepared and has room for {room} frames",
            )
        closed = sorted(set(range(config.max_batch_size)).difference(open_slots))
        flags = (self.has_room, self.was_prepared, self.is_sealed)
        require(not any(flag[closed].any() for flag in flags), f"free slots {closed} are not new")


def frames_each(stream_ids: Sequence[StreamId], chunk_frames: int | Sequence[int]) -> IntArray:
    """One count for each stream. Raises StreamStateError for what is no count."""
    counts = np.asarray(chunk_frames)
    if counts.size and counts.dtype.kind not in "iu":
        raise StreamStateError(
            f"chunk_frames={chunk_frames!r} counts frames: give an integer, or one for each stream"
        )
    if counts.ndim == 0:
        return np.full(len(stream_ids), counts, dtype=np.int64)
    if counts.shape != (len(stream_ids),):
        raise StreamStateError(
            f"{counts.size} frame counts for {len(stream_ids)} streams: give one for each"
        )
    return counts.astype(np.int64)
