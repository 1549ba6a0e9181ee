"""Which slot belongs to which stream id, which only the faces by id need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oasr_backend.cache.kv_tables import IntArray
from oasr_backend.cache.slot_pool import StreamSlotPool
from oasr_backend.errors import StreamStateError, UnknownStreamError
from oasr_backend.types import StreamId


class SlotMap:
    """One manager's streams and their slots.

    A slot comes from `shared_pool` when there is one, else from a pool of the manager's own. A
    `slot_id` named by the caller stays the caller's to free when the pool is shared.
    """

    def __init__(self, what: str, capacity: int, shared_pool: StreamSlotPool | None = None) -> None:
        self._what = what
        self.capacity = capacity
        self._shared_pool = shared_pool
        self._own_pool = StreamSlotPool(capacity)
        self._slots: dict[StreamId, int] = {}
        self._bound_ids: set[StreamId] = set()

    def __contains__(self, stream_id: object) -> bool:
        return stream_id in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def slot_of(self, stream_id: StreamId) -> int:
        if stream_id not in self._slots:
            raise UnknownStreamError(
                f"{self._what} of stream {stream_id!r} is not allocated: unknown or freed"
            )
        return self._slots[stream_id]

    def slots_of(self, stream_ids: Sequence[StreamId]) -> IntArray:
        try:
            slots = [self._slots[stream_id] for stream_id in stream_ids]
        except KeyError as error:
            self.slot_of(error.args[0])
            raise
        return np.array(slots, dtype=np.int64)

    def distinct_slots(self, stream_ids: Sequence[StreamId]) -> IntArray:
        """`slots_of` that refuses a repeated id with StreamStateError."""
        slots_B = self.slots_of(stream_ids)
        if len(set(stream_ids)) != len(stream_ids):
            raise StreamStateError(f"a stream is named twice in {list(stream_ids)}")
        return slots_B

    def values(self) -> list[int]:
        """The slots in use."""
        return list(self._slots.values())

    def bind(self, stream_id: StreamId, slot_id: int | None = None) -> int:
        """Raises StreamStateError (duplicate, taken or out of range), PoolExhaustedError."""
        if stream_id in self._slots:
            raise StreamStateError(f"{self._what} of stream {stream_id!r} is already allocated")
        slot = self._take(stream_id) if slot_id is None else self._claim(slot_id)
        self._slots[stream_id] = slot
        return slot

    def release(self, stream_id: StreamId) -> int:
        slot = self.slot_of(stream_id)
        del self._slots[stream_id]
        self._own_pool.free(slot)
        if stream_id in self._bound_ids and self._shared_pool is not None:
            self._bound_ids.remove(stream_id)
            self._shared_pool.unbind(stream_id)
        return slot

    def _claim(self, slot_id: int) -> int:
        if not 0 <= slot_id < self.capacity:
            raise StreamStateError(
                f"{self._what}: slot {slot_id} is out of range [0, {self.capacity})"
            )
        return self._own_pool.claim(slot_id)

    def _take(self, stream_id: StreamId) -> int:
        if self._shared_pool is None:
            return self._own_pool.allocate()
        slot = self._shared_pool.bind(stream_id)
        try:
            self._claim(slot)
        except StreamStateError:
            self._shared_pool.unbind(stream_id)
            raise
        self._bound_ids.add(stream_id)
        return slot
