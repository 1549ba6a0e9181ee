"""All that is kept of every stream, by slot: open, prepare, commit, close."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from oasr_backend.cache import StreamSlotPool
from oasr_backend.cache.kv_store import KvStore
from oasr_backend.cache.state import SlotStates
from oasr_backend.decoders.arrays import IntArray
from oasr_backend.decoders.base import Finish
from oasr_backend.decoders.group import DecoderGroup
from oasr_backend.errors import StreamLimitError
from oasr_backend.models.acoustic_model import ModelOutput
from oasr_backend.models.base import EncoderCaches
from oasr_backend.options import StreamOptions


class StepRows(NamedTuple):
    """Whose rows a step has, (B,) slots, and how much of each one's window is heard, (B,).

    `num_frames_B` are encoder frames; the first `num_real_B` feature frames hold samples.
    """

    slots_B: IntArray
    num_frames_B: IntArray
    num_real_B: IntArray

    @property
    def width(self) -> int:
        return self.slots_B.size

    def part(self, rows: slice) -> StepRows:
        return StepRows(self.slots_B[rows], self.num_frames_B[rows], self.num_real_B[rows])


NO_ROWS = StepRows(*(np.empty(0, dtype=np.int64) for _ in StepRows._fields))


class StreamPart(Protocol):
    """One kind of state, with a row for every slot. Each call is for slots that are open."""

    def open(self, slot: int, options: StreamOptions) -> None:
        """Puts the slot at the start of a stream, or raises and changes nothing."""

    def prepare(self, slots_B: IntArray) -> None:
        """Makes room for one more chunk of each."""

    def commit(self, rows: StepRows, output: ModelOutput) -> Finish | None:
        """Makes the chunk count. What is returned waits for the device and takes in the rest."""

    def close(self, slot: int) -> None:
        """Gives back what the stream holds."""

    def check_integrity(self, slots: Collection[int]) -> None:
        """Raises AssertionError unless exactly these slots hold anything, and all is sound."""


class KvPart:
    """Attention history in paged blocks; an encoder without attention has no such part."""

    def __init__(self, kv: KvStore) -> None:
        self._kv = kv

    def open(self, slot: int, options: StreamOptions) -> None:  # noqa: ARG002
        self._kv.open(slot)

    def prepare(self, slots_B: IntArray) -> None:
        self._kv.prepare(slots_B)

    def commit(self, rows: StepRows, output: ModelOutput) -> None:  # noqa: ARG002
        self._kv.commit(rows.slots_B, rows.num_frames_B, upload=False)

    def close(self, slot: int) -> None:
        self._kv.close(slot)

    def check_integrity(self, slots: Collection[int]) -> None:
        self._kv.check_integrity(slots)


class StatePart:
    """The states that the encoder declares; a step stores them itself, last of all."""

    def __init__(self, states: SlotStates) -> None:
        self._states = states

    def open(self, slot: int, options: StreamOptions) -> None:  # noqa: ARG002
        self._states.open(slot)

    def prepare(self, slots_B: IntArray) -> None:  # noqa: ARG002
        self._states.zero_pending()

    def commit(self, rows: StepRows, output: ModelOutput) -> None:
        pass

    def close(self, slot: int) -> None:
        self._states.close(slot)

    def check_integrity(self, slots: Collection[int]) -> None:
        """The rows are on the device alone, so that there is nothing to disagree with."""


class SearchPart:
    """Hypotheses, and what a second pass keeps of the stream until it ends."""

    def __init__(self, decoders: DecoderGroup) -> None:
        self._decoders = decoders

    def open(self, slot: int, options: StreamOptions) -> None:
        self._decoders.open(slot, options)

    def prepare(self, slots_B: IntArray) -> None:
        pass

    def commit(self, rows: StepRows, output: ModelOutput) -> Finish:
        return self._decoders.begin(
            rows.slots_B, rows.num_frames_B, output.heads, output.encoded_BTD
        )

    def close(self, slot: int) -> None:
        self._decoders.close(slot)

    def check_integrity(self, slots: Collection[int]) -> None:
        self._decoders.check_integrity(slots)


class StreamStore:
    """The parts of one engine and the slots that address them.

    State changes at open, prepare, commit and close only. `further` are parts that neither the
    encoder nor the decoders read.
    """

    def __init__(
        self,
        kv: KvStore | None,
        states: SlotStates,
        decoders: DecoderGroup,
        *,
        chunk_frames: int,
        window_frames: int,
        further: Sequence[StreamPart] = (),
    ) -> None:
        self.kv, self.states, self.decoders = kv, states, decoders
        self.device = states.device
        # What a CPU's slot holds takes memory from its first stream on.
        on_cpu = self.device.type == "cpu"
        self.slots = StreamSlotPool(states.num_slots, reuses_first=on_cpu)
        attention = [] if kv is None else [KvPart(kv)]
        self._parts: list[StreamPart] = [
            *attention, StatePart(states), SearchPart(decoders), *further,
        ]  # fmt: skip
        self._open: set[int] = set()
        self.chunk_frames, self._window_frames = chunk_frames, window_frames

    @property
    def has_bounded_history(self) -> bool:
        """Whether streams may go on for ever."""
        return self.kv is None or self.kv.config.evicts

    @property
    def most_history_frames(self) -> int:
        """Frames of its past that a stream with bounded history can see."""
        return 0 if self.kv is None else self.kv.config.max_cache_frames

    def open(self, options: StreamOptions) -> int:
        """Allocates every part of a stream or none of it; returns its slot.

        Raises StreamLimitError where the last free slots are those of failed closes.
        """
        self._check_lost()
        slot, opened = self.slots.allocate(), list[StreamPart]()
        try:
            for part in self._parts:
                part.open(slot, options)
                opened.append(part)
        except Exception:
            for part in opened:
                part.close(slot)
            self.slots.free(slot)
            raise
        self._open.add(slot)
        return slot

    def prepare(self, slots_B: IntArray) -> None:
        """Makes room for one more chunk of every stream; nothing is written yet."""
        for part in self._parts:
            part.prepare(slots_B)

    def commit(self, rows: StepRows, output: ModelOutput) -> Finish:
        """Makes the step count: lengths advance, old history goes.

        `output` has been read, as the device sees it, when this returns. Hypotheses grow with the
        returned call, which waits for the device.
        """
        begun = [part.commit(rows, output) for part in self._parts]
        waits = [finish for finish in begun if finish is not None]

        def finish_all() -> None:
            for finish in waits:
                finish()

        return finish_all

    def close(self, slot: int) -> None:
        """Closes every part even if one fails, then raises the first error.

        A slot with a part that failed is given to no other stream.
        """
        self._open.discard(slot)
        errors = [error for part in self._parts if (error := _error_of_close(part, slot))]
        if errors:
            raise errors[0]
        self.slots.free(slot)

    def _check_lost(self) -> None:
        """Raises StreamLimitError where every slot without an open stream is lost."""
        num_lost = self.slots.capacity - len(self._open)
        if num_lost and not self.slots.num_free_slots:
            raise StreamLimitError(
                f"no slot is left: streams open: {len(self._open)} of {self.slots.capacity}, rows "
                f"lost to streams that could not be closed: {num_lost}; a reload of the model "
                "brings them back"
            )

    def at_capacity(self, slots_B: IntArray) -> npt.NDArray[np.bool_]:
        """(B,) whether there is no room for another chunk; never where history is bounded."""
        if self.kv is None or self.kv.config.evicts:
            return np.zeros(slots_B.size, dtype=np.bool_)
        return self.kv.at_capacity(slots_B)

    # What a step reads and writes

    def write_row_data(self, rows: StepRows, into_4W: IntArray) -> None:
        """Slot, real new frames, position of the oldest visible key, real feature frames of a row.

        Rows past the streams' belong to the padding lane.
        """
        width = rows.width
        into_4W[0, :width], into_4W[0, width:] = rows.slots_B, self.states.pad_slot
        into_4W[1, :width], into_4W[1, width:] = rows.num_frames_B, self.chunk_frames
        into_4W[3, :width], into_4W[3, width:] = rows.num_real_B, self._window_frames
        into_4W[2] = 0
        if self.kv is not None:
            into_4W[2, :width] = self.kv.first_key_positions(rows.slots_B)

    def history_frames(self, slots_B: IntArray) -> int:
        """The most frames that any of the streams sees of its past."""
        return 0 if self.kv is None else self.kv.history_frames(slots_B)

    def encoder_caches(self, rows_4W: Tensor, *, history_frames: int) -> EncoderCaches:
        """The views of a step whose row data this is; tensors only, no wait for the device.

        `history_frames` bounds every row's history from above.
        """
        slots_W, num_new_W, first_key_position_W, _ = rows_4W.unbind()
        views = (
            []
            if self.kv is None
            else self.kv.views(slots_W, num_new_W=num_new_W, history_frames=history_frames)
        )
        return EncoderCaches(
            kv=views,
            first_key_position_B=first_key_position_W,
            num_new_B=num_new_W,
            states=self.states.staged_views(slots_W),
        )

    def check_integrity(self) -> None:
        """Every part agrees with itself and with the slots that are open."""
        for part in self._parts:
            part.check_integrity(self._open)


def _error_of_close(part: StreamPart, slot: int) -> Exception | None:
    try:
        part.close(slot)
    except Exception as error:
        return error
    return None
