"""The row numbers that all slot-addressed caches of a stream share."""

from __future__ import annotations

from collections import OrderedDict

from oasr_backend.errors import (
    ConfigError,
    PoolExhaustedError,
    StreamStateError,
    UnknownStreamError,
)
from oasr_backend.types import StreamId


class StreamSlotPool:
    """Hands out slots [0, capacity), oldest-freed first.

    Slots that no stream has had yet count as freed long ago; with `reuses_first` they come last.
    `bind` is for managers that share one pool: the first binding of a stream takes a slot, the
    others get the same one, and the slot is free again after as many calls of `unbind`.
    """

    def __init__(self, capacity: int, *, reuses_first: bool = False) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        # Ordered, and a slot is found in it without a search.
        self._new_slots = OrderedDict.fromkeys(range(capacity if reuses_first else 0))
        self._free_slots = OrderedDict.fromkeys(range(len(self._new_slots), capacity))
        self._bound: dict[StreamId, int] = {}
        self._bindings: dict[StreamId, int] = {}

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots) + len(self._new_slots)

    def allocate(self) -> int:
        slots = self._free_slots or self._new_slots
        if not slots:
            raise PoolExhaustedError(
                "StreamSlotPool", requested=1, free=0, total=self.capacity,
                remedy="free a stream, or raise max_batch_size",
            )  # fmt: skip
        slot_id, _ = slots.popitem(last=False)
        return slot_id

    def claim(self, slot_id: int) -> int:
        """Takes the very slot that is asked for."""
        self._check_range(slot_id)
        for slots in (self._free_slots, self._new_slots):
            if slot_id in slots:
                del slots[slot_id]
                return slot_id
        raise StreamStateError(f"slot {slot_id} is already in use")

    def free(self, slot_id: int) -> None:
        self._check_range(slot_id)
        if slot_id in self._free_slots or slot_id in self._new_slots:
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
