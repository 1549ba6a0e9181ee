"""Which row of the slot-addressed tensors belongs to which stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from oasr_backend.errors import (
    ConfigError,
    PoolExhaustedError,
    StreamStateError,
    UnknownStreamError,
)
from oasr_backend.types import StreamId


class StreamSlotPool:
    """Hands out slots [0, capacity), oldest-freed first.

    `bind` is for managers that share one pool: the first binding of a stream takes a slot, the
    others get the same one, and the slot is free again after as many calls of `unbind`.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        # Ordered, and a slot is found in it without a search.
        self._free_slots = OrderedDict.fromkeys(range(capacity))
        self._bound: dict[StreamId, int] = {}
        self._bindings: dict[StreamId, int] = {}

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def allocate(self) -> int:
        if not self._free_slots:
            raise PoolExhaustedError(
                "StreamSlotPool", requested=1, free=0, total=self.capacity,
                remedy="free a stream, or raise max_batch_size",
            )  # fmt: skip
        slot_id, _ = self._free_slots.popitem(last=False)
        return slot_id

    def claim(self, slot_id: int) -> int:
        """Takes the very slot that is asked for."""
        self._check_range(slot_id)
        if slot_id not in self._free_slots:
            raise StreamStateError(f"slot {slot_id} is already in use")
        del self._free_slots[slot_id]
        return slot_id

    def free(self, slot_id: int) -> None:
        self._check_range(slot_id)
        if slot_id in self._free_slots:
            raise StreamStateError(f"double free: slot {slot_id} is already free")
        self._free_slots[slot_id] = None

    def bind(self, stream_id: StreamId) -> int:
        if stream_id not in self._bound:
            self._bound[stream_id] = self.allocate()
        self._bindings[stream_id] = self._bindings.get(stream_id, 0) + 1
        return self._bound[stream_id]

    def unbind(self, stream_id: StreamId) -> None:
        if stream_id not in self._bound:
            raise UnknownStreamError(f"stream {stream_id!r} has no slot")
        self._bindings[stream_id] -= 1
        if self._bindings[stream_id] == 0:
            del self._bindings[stream_id]
            self.free(self._bound.pop(stream_id))

    def _check_range(self, slot_id: int) -> None:
        if not 0 <= slot_id < self.capacity:
            raise StreamStateError(f"slot {slot_id} is out of range [0, {self.capacity})")


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

    def slots_of(self, stream_ids: Sequence[StreamId]) -> list[int]:
        try:
            return [self._slots[stream_id] for stream_id in stream_ids]
        except KeyError as error:
            self.slot_of(error.args[0])
            raise

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
