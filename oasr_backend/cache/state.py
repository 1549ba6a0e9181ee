"""Fixed-extent state of all streams: one persistent tensor a declaration, a slot a stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oasr_backend.cache.slot_map import SlotMap
from oasr_backend.cache.slot_pool import StreamSlotPool
from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.device import reserved_zeros, to_device
from oasr_backend.errors import ConfigError, StreamStateError, UnknownStreamError
from oasr_backend.kernels.roll import roll_rows, rolled
from oasr_backend.types import StreamId

__all__ = ["SlotStateCache", "SlotStates", "SlotTensor", "StagedSlotTensor", "StreamStateSpec"]

SlotIds = Sequence[int] | Tensor


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
    # The newest frames of a sliding window, and the axis that they are on.
    _rolled: list[tuple[Tensor, int]] = field(default_factory=list)

    def gather(self) -> Tensor:
        if self._staged:
            return self._staged[0].clone()
        rows = super().gather()
        return rolled(rows, *self._rolled[0]) if self._rolled else rows

    def scatter(self, new: Tensor) -> None:
        self.check_rows(new)
        self._rolled.clear()
        self._staged[:] = [new]

    def roll_in(self, new: Tensor, *, axis: int) -> None:
        """Hands over a sliding window's newest frames; as many of the oldest go.

        `new` is shaped like what `gather` returns, but for `axis`, on which the frames lie. Before
        `store` the rows are what they were, for `layer` too.
        """
        self._staged.clear()
        self._rolled[:] = [(new, axis)]

    def layer(self, number: int) -> SlotTensor:
        """The rows of one layer as they are stored, where axis 0 counts layers and 1 slots."""
        return SlotTensor(self.buffer[number], self.slot_ids)

    def store(self) -> None:
        """Overwrites the rows with what was handed over last, if anything was."""
        if self._rolled:
            new, axis = self._rolled.pop()
            roll_rows(self.buffer, self.slot_ids, new, self.slot_axis, axis)
        elif self._staged:
            super().scatter(self._staged.pop())


class SlotStates:
    """Every declared state of every stream, addressed by slot.

    Zero is every state's initial value: a zero left context is an offline pass's padding.
    `extra_slots` past `num_slots` are padding lanes. Addresses are stable. The caller is trusted to
    open a slot once. Not thread-safe, but for `zero_pending` beside `open`, `close` and `reset`.
    """

    def __init__(
        self,
        specs: Sequence[StreamStateSpec],
        num_slots: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        extra_slots: int = 0,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        if len(self.specs) != len(specs):
            raise ConfigError(f"state names repeat: {[spec.name for spec in specs]}")
        if num_slots < 1 or extra_slots < 0:
            raise ConfigError(
                f"max_batch_size={num_slots} must be >= 1, extra_slots={extra_slots} >= 0"
            )
        self.device = device
        self.num_slots, self.pad_slots = num_slots, list(range(num_slots, num_slots + extra_slots))
        self._opened: list[int] = []
        self._rewound: list[int] = []
        # Streams may be opened while the model runs, whose look at the states zeroes what is new.
        self._zeroing = threading.Lock()
        self._buffers = {
            spec.name: reserved_zeros(
                spec.buffer_shape(num_slots + extra_slots), dtype=spec.dtype or dtype, device=device
            )
            for spec in specs
        }

    @property
    def pad_slot(self) -> int:
        """The lane for rows that pad a step. Raises ConfigError when there is none."""
        if not self.pad_slots:
            raise ConfigError("the states have no padding lane: make them with extra_slots=1")
        return self.pad_slots[0]

    @property
    def nbytes_per_stream(self) -> int:
        num_rows = self.num_slots + len(self.pad_slots)
        return sum(buffer.nbytes for buffer in self._buffers.values()) // num_rows

    # Life of a stream

    def open(self, slot: int) -> None:
        """Zeroes every state of the slot, before the next look at it."""
        with self._zeroing:
            self._opened.append(slot)

    def reset(self, slot: int) -> None:
        """Zeroes what describes the audio; the persistent states stay."""
        with self._zeroing:
            self._rewound.append(slot)

    def close(self, slot: int) -> None:
        self._before_reuse(slot)

    def _before_reuse(self, slot: int) -> None:
        """Called with a slot that became free; tests fill it with NaN here."""

    def zero_pending(self) -> None:
        """Zeroes the slots that were opened or reset since the last look, all at once.

        Every accessor does it; the caller does it before it replays a captured graph.
        """
        with self._zeroing:
            if self._opened or self._rewound:
                # Inside: who comes next may write to these rows.
                self._zero(self._opened, self._rewound)
                self._opened, self._rewound = [], []

    def _zero(self, opened: list[int], rewound: list[int]) -> None:
        opened_N = self._slot_index(sorted(set(opened)))
        either_N = self._slot_index(sorted({*opened, *rewound})) if rewound else opened_N
        for spec in self.specs.values():
            index_N = opened_N if spec.persistent else either_N
            self._buffers[spec.name].index_fill_(spec.slot_axis, index_N, 0)

    # What the model reads and writes

    def spec_of(self, name: str) -> StreamStateSpec:
        if name not in self.specs:
            raise UnknownStreamError(f"no state {name!r}; declared: {sorted(self.specs)}")
        return self.specs[name]

    def buffer_of(self, name: str) -> Tensor:
        """All slots of one state, aliased."""
        self.spec_of(name)
        self.zero_pending()
        return self._buffers[name]

    def row_of(self, name: str, slot: int) -> Tensor:
        """View of one slot's state, its slot axis kept with size 1."""
        return self.buffer_of(name).narrow(self.spec_of(name).slot_axis, slot, 1)

    def fill_slot(self, name: str, slot: int, value: float) -> None:
        """Sets every element of one slot's state, without an upload."""
        spec, num_rows = self.spec_of(name), self.num_slots + len(self.pad_slots)
        if not 0 <= slot < num_rows:
            raise StreamStateError(f"slot {slot} is out of range [0, {num_rows})")
        self.buffer_of(name).select(spec.slot_axis, slot).fill_(value)

    def views(self, slots: SlotIds) -> dict[str, SlotTensor]:
        """Every state's rows for a batch, by name. A tensor of slots costs no upload."""
        self.zero_pending()
        index = self._slot_index(slots)
        return {
            spec.name: SlotTensor(self._buffers[spec.name], index, spec.slot_axis)
            for spec in self.specs.values()
        }

    def staged_views(self, slots: SlotIds) -> dict[str, StagedSlotTensor]:
        """`views` whose rows change when they are told to `store`, and not before."""
        return {
            name: StagedSlotTensor(view.buffer, view.slot_ids, view.slot_axis)
            for name, view in self.views(slots).items()
        }

    def view_of(self, name: str, slots: SlotIds) -> SlotTensor:
        """One state's rows for a batch."""
        buffer = self.buffer_of(name)
        return SlotTensor(buffer, self._slot_index(slots), self.spec_of(name).slot_axis)

    def _slot_index(self, slots: SlotIds) -> Tensor:
        if isinstance(slots, Tensor):
            return slots
        return to_device(np.asarray(slots, dtype=np.int64), self.device)


class SlotStateCache:
    """`SlotStates` whose slots are named by stream id, and whose callers are checked."""

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
        self.states = SlotStates(
            specs, max_batch_size, device, dtype=dtype, extra_slots=extra_slots
        )
        self._slots = SlotMap(self._what(), max_batch_size, slot_pool)

    def _what(self) -> str:
        return "stream state"

    @property
    def pad_slots(self) -> list[int]:
        return self.states.pad_slots

    @property
    def nbytes_per_stream(self) -> int:
        return self.states.nbytes_per_stream

    # Life of a stream

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
        slots = [self.slot_of(stream_id) for stream_id in stream_ids]
        for slot in slots:
            self.states.open(slot)
        return slots

    def reset_stream(self, stream_id: StreamId) -> None:
        """Zeroes what describes the audio and keeps the persistent states and the slot."""
        self.reset_streams([stream_id])

    def reset_streams(self, stream_ids: Sequence[StreamId]) -> None:
        """`reset_stream` of many or of none."""
        for slot in [self.slot_of(stream_id) for stream_id in stream_ids]:
            self.states.reset(slot)

    def free_stream(self, stream_id: StreamId) -> None:
        self.states.close(self._slots.release(stream_id))

    def slot_of(self, stream_id: StreamId) -> int:
        return self._slots.slot_of(stream_id)

    # What the model reads and writes

    def get_state(self, name: str, stream_id: StreamId) -> Tensor:
        """View of one stream's state, its slot axis kept with size 1."""
        self.states.spec_of(name)
        return self.states.row_of(name, self.slot_of(stream_id))

    def fill_slot(self, name: str, slot_id: int, value: float) -> None:
        """Sets every element of one slot's state, without an upload."""
        self.states.fill_slot(name, slot_id, value)

    def buffer_of(self, name: str) -> Tensor:
        return self.states.buffer_of(name)

    def views(self, slot_ids: SlotIds) -> dict[str, SlotTensor]:
        """Every state's rows for a batch, by name."""
        return self.states.views(slot_ids)
