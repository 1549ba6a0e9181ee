"""Fixed-extent state of all streams: one persistent tensor a declaration, a slot a stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oasr_backend.cache.slot_pool import SlotMap, StreamSlotPool
from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.device import to_device
from oasr_backend.errors import ConfigError, StreamStateError, UnknownStreamError
from oasr_backend.types import StreamId

__all__ = ["SlotStateCache", "SlotTensor", "StagedSlotTensor", "StreamStateSpec"]


@dataclass(frozen=True)
class SlotTensor:
    """Rows `slot_ids` (B,) int64 of one state's buffer, in that order, on `slot_axis`."""

    buffer: Tensor
    slot_ids: Tensor
    slot_axis: int = 0

    def gather(self) -> Tensor:
        """Fresh; the buffer's shape with B for the slots."""
        return self.buffer.index_select(self.slot_axis, self.slot_ids)

    def scatter(self, new: Tensor) -> None:
        """Overwrites the rows in place. `new` is shaped like what `gather` returns."""
        self.check_rows(new)
        self.buffer.index_copy_(self.slot_axis, self.slot_ids, new.detach().to(self.buffer.dtype))

    def check_rows(self, new: Tensor) -> None:
        """Raises StreamStateError for another shape than that of the rows."""
        expected = list(self.buffer.shape)
        expected[self.slot_axis] = self.slot_ids.shape[0]
        if list(new.shape) != expected:
            raise StreamStateError(f"scatter: expected {tuple(expected)}, got {tuple(new.shape)}")


@dataclass(frozen=True)
class StagedSlotTensor(SlotTensor):
    """Rows whose new contents wait for `store`, so that a step that fails can be run again."""

    _staged: list[Tensor] = field(default_factory=list)

    def gather(self) -> Tensor:
        return self._staged[0].clone() if self._staged else super().gather()

    def scatter(self, new: Tensor) -> None:
        self.check_rows(new)
        self._staged[:] = [new]

    def store(self) -> None:
        """Overwrites the rows with what was scattered last, if anything was."""
        if self._staged:
            super().scatter(self._staged.pop())


class SlotStateCache:
    """Zero is every state's initial value: a zero left context is an offline pass's padding.

    `extra_slots` past `max_batch_size` are padding lanes; no stream gets one. Addresses are
    stable. Not thread-safe, but for `zero_pending` beside allocation.
    """

    def __init__(
        self,
        specs: Sequence[StreamStateSpec],
        max_batch_size: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        extra_slots: int = 0,
        slot_pool: StreamSlotPool | None = None,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        if len(self.specs) != len(specs):
            raise ConfigError(f"state names repeat: {[spec.name for spec in specs]}")
        if max_batch_size < 1 or extra_slots < 0:
            raise ConfigError(
                f"max_batch_size={max_batch_size} must be >= 1, extra_slots={extra_slots} >= 0"
            )
        self.device = device
        self.pad_slots = list(range(max_batch_size, max_batch_size + extra_slots))
        self._to_zero: dict[str, list[int]] = {}
        # Streams may be opened while the model runs, whose look at the states zeroes what is new.
        self._zeroing = threading.Lock()
        self._slots = SlotMap(self._what(), max_batch_size, slot_pool)
        num_slots = max_batch_size + extra_slots
        self._buffers = {
            spec.name: torch.zeros(
                spec.buffer_shape(num_slots), dtype=spec.dtype or dtype, device=device
            )
            for spec in specs
        }

    def _what(self) -> str:
        return "stream state"

    @property
    def nbytes_per_stream(self) -> int:
        num_slots = self._slots.capacity + len(self.pad_slots)
        return sum(buffer.nbytes for buffer in self._buffers.values()) // num_slots

    def buffer_of(self, name: str) -> Tensor:
        self.spec_of(name)
        self.zero_pending()
        return self._buffers[name]

    def spec_of(self, name: str) -> StreamStateSpec:
        if name not in self.specs:
            raise UnknownStreamError(f"no state {name!r}; declared: {sorted(self.specs)}")
        return self.specs[name]

    def allocate_stream(self, stream_id: StreamId, slot_id: int | None = None) -> int:
        """Zeroes the slot and returns it. Raises StreamStateError, PoolExhaustedError."""
        return self.allocate_streams([stream_id], None if slot_id is None else [slot_id])[0]

    def allocate_streams(
        self, stream_ids: Sequence[StreamId], slot_ids: Sequence[int] | None = None
    ) -> list[int]:
        """`allocate_stream` of many or of none, with one zeroing a state."""
        wanted = [None] * len(stream_ids) if slot_ids is None else list(slot_ids)
        if len(wanted) != len(stream_ids):
            raise StreamStateError(
                f"{len(wanted)} slots for {len(stream_ids)} streams: give one for each, or none"
            )
        bound: list[StreamId] = []
        try:
            for stream_id, slot_id in zip(stream_ids, wanted, strict=True):
                self._slots.bind(stream_id, slot_id)
                bound.append(stream_id)
        except (StreamStateError, RuntimeError):
            for stream_id in bound:
                self._slots.release(stream_id)
            raise
        slots = [self._slots.slot_of(stream_id) for stream_id in stream_ids]
        self._zero(slots, list(self.specs.values()))
        return slots

    def reset_stream(self, stream_id: StreamId) -> None:
        """Zeroes what describes the audio and keeps the persistent states and the slot."""
        self.reset_streams([stream_id])

    def reset_streams(self, stream_ids: Sequence[StreamId]) -> None:
        slots = [self._slots.slot_of(stream_id) for stream_id in stream_ids]
        self._zero(slots, [spec for spec in self.specs.values() if not spec.persistent])

    def free_stream(self, stream_id: StreamId) -> None:
        slot = self._slots.release(stream_id)
        self._before_reuse(slot)

    def slot_of(self, stream_id: StreamId) -> int:
        return self._slots.slot_of(stream_id)

    def fill_slot(self, name: str, slot_id: int, value: float) -> None:
        """Sets every element of one slot's state, without an upload."""
        spec = self.spec_of(name)
        num_slots = self._slots.capacity + len(self.pad_slots)
        if not 0 <= slot_id < num_slots:
            raise StreamStateError(f"slot {slot_id} is out of range [0, {num_slots})")
        self.zero_pending()
        self._buffers[name].select(spec.slot_axis, slot_id).fill_(value)

    def get_state(self, name: str, stream_id: StreamId) -> Tensor:
        """View of one stream's state, its slot axis kept with size 1."""
        spec, slot = self.spec_of(name), self._slots.slot_of(stream_id)
        self.zero_pending()
        return self._buffers[name].narrow(spec.slot_axis, slot, 1)

    def views(self, slot_ids: Sequence[int] | Tensor) -> dict[str, SlotTensor]:
        """Every state's rows for a batch, by name. A tensor of slots costs no upload."""
        self.zero_pending()
        index = self._slot_index(slot_ids)
        return {
            spec.name: SlotTensor(self._buffers[spec.name], index, spec.slot_axis)
            for spec in self.specs.values()
        }

    def staged_views(self, slot_ids: Sequence[int] | Tensor) -> dict[str, StagedSlotTensor]:
        """`views` whose rows change when they are told to `store`, and not before."""
        return {
            name: StagedSlotTensor(view.buffer, view.slot_ids, view.slot_axis)
            for name, view in self.views(slot_ids).items()
        }

    def view_of(self, name: str, slot_ids: Sequence[int] | Tensor) -> SlotTensor:
        spec = self.spec_of(name)
        self.zero_pending()
        return SlotTensor(self._buffers[name], self._slot_index(slot_ids), spec.slot_axis)

    def _before_reuse(self, slot_id: int) -> None:
        """Called with a slot that became free; tests fill it with NaN here."""

    def _slot_index(self, slot_ids: Sequence[int] | Tensor) -> Tensor:
        if isinstance(slot_ids, Tensor):
            return slot_ids
        return to_device(np.asarray(slot_ids, dtype=np.int64), self.device)

    def _zero(self, slots: Sequence[int], specs: Sequence[StreamStateSpec]) -> None:
        """Notes what to zero; it happens before anybody can look, for all new streams at once."""
        with self._zeroing:
            for spec in specs:
                self._to_zero.setdefault(spec.name, []).extend(slots)

    def zero_pending(self) -> None:
        """Zeroes the slots of streams that are new since the last look.

        Every accessor does it; whoever replays a captured graph calls it before.
        """
        with self._zeroing:
            pending, self._to_zero = self._to_zero, {}
        for name, slots in pending.items():
            index = self._slot_index(sorted(set(slots)))
            self._buffers[name].index_fill_(self.specs[name].slot_axis, index, 0)
