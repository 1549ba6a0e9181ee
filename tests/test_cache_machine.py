"""Pool, stores, managers and contexts against dictionaries, over random lives of streams.

One machine speaks by stream id and checks every refusal; one speaks by slot, as a step does, over
memory that is NaN where it is free. OASR_STATE_STEPS scales the number of steps (default 10 000).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from oasr_backend.cache import (
    AttentionCacheManager,
    BlockPool,
    CacheConfig,
    CnnCacheManager,
    KvStore,
    StreamContext,
    StreamSlotPool,
    StreamStateSpec,
)
from oasr_backend.cache.kv_tables import IntArray
from oasr_backend.errors import (
    PoolExhaustedError,
    StreamNotPreparedError,
    StreamStateError,
    UnknownStreamError,
)
from oasr_backend.types import StreamId
from tests.reference.poison import PoisonedPool, PoisonedStates

STEPS_PER_EXAMPLE = 50
# An example may end before its last step. Each of the two machines takes half of the steps.
NUM_EXAMPLES = max(1, int(os.environ.get("OASR_STATE_STEPS", "10000")) // 80)
POSITION_LIMIT = 40
MAX_STREAMS = 3
IDS: list[StreamId] = [0, 1, "0", "b", 7]
LAYERS, HEADS, DIM = 1, 1, 1


@dataclass
class Model:
    """What a stream should hold: the values of its visible frames, oldest first."""

    context: StreamContext[Any]
    slot: int
    visible: list[float] = field(default_factory=list)
    conv: float = 0.0
    heard: int = 0
    is_prepared: bool = False
    was_prepared: bool = False
    is_sealed: bool = False


@st.composite
def configs(draw: st.DrawFn) -> CacheConfig:
    """Any geometry, with a pool of exactly the peaks where history is bounded."""
    chunk = draw(st.integers(1, 4))
    left = draw(st.sampled_from([-1, 0, 1, 2, 4]))
    window = draw(st.none() | st.integers(0, 11)) if left < 0 else None
    is_bounded = left >= 0 or window is not None
    config = CacheConfig(
        num_layers=LAYERS, n_kv_head=HEADS, head_dim=DIM, hidden_dim=2, kernel_size=2,
        chunk_size=chunk, block_size_frames=chunk + draw(st.integers(0, 6)), num_left_chunks=left,
        window_frames=window, prefill_kv_window=is_bounded and draw(st.booleans()),
        max_num_blocks=None, max_blocks_per_seq=24, max_batch_size=MAX_STREAMS,
        dtype=torch.float64, device=torch.device("cpu"), position_limit_frames=POSITION_LIMIT,
    )  # fmt: skip
    return replace(config, max_num_blocks=MAX_STREAMS * (config.peak_blocks or 4))


class CacheMachine(RuleBasedStateMachine):
    @initialize(config=configs(), lanes=st.integers(0, 2))
    def build(self, config: CacheConfig, lanes: int) -> None:
        self.config = config
        self.pool = BlockPool(self.config, scratch_blocks=lanes)
        slots = StreamSlotPool(MAX_STREAMS)
        self.attention = AttentionCacheManager(
            self.pool, self.config, pad_lanes=lanes, slot_pool=slots
        )
        self.convolution = CnnCacheManager(self.config, extra_slots=lanes, slot_pool=slots)
        self.models: dict[StreamId, Model] = {}
        self.written = 0.0

    # Rules

    @rule(stream_id=st.sampled_from(IDS))
    def open(self, stream_id: StreamId) -> None:
        if stream_id in self.models:
            with pytest.raises(StreamStateError):
                self.attention.allocate_stream(stream_id)
        elif len(self.models) == MAX_STREAMS:
            with pytest.raises(PoolExhaustedError):
                self.attention.allocate_stream(stream_id)
        else:
            slot = self.attention.allocate_stream(stream_id)
            assert self.convolution.allocate_stream(stream_id) == slot
            context: StreamContext[Any] = StreamContext(stream_id, self.attention, self.convolution)
            self.models[stream_id] = self.new_model(context, slot)

    def new_model(self, context: StreamContext[Any], slot: int) -> Model:
        frames = self.config.prefilled_cache_frames
        return Model(context, slot, visible=[0.0] * frames, heard=frames)

    @rule(stream_id=st.sampled_from(IDS))
    def close(self, stream_id: StreamId) -> None:
        if stream_id in self.models:
            context = self.models.pop(stream_id).context
            context.free()
            context.free()
        else:
            with pytest.raises(UnknownStreamError):
                self.attention.free_stream(stream_id)

    @rule(stream_id=st.sampled_from(IDS))
    def reset(self, stream_id: StreamId) -> None:
        if stream_id in self.models:
            model = self.models[stream_id]
            model.context.reset()
            self.models[stream_id] = self.new_model(model.context, model.slot)

    @rule(ids=st.lists(st.sampled_from(IDS), max_size=4))
    def prepare_any(self, ids: list[StreamId]) -> None:
        self.prepare(ids)

    @precondition(lambda self: self.growing())
    @rule(data=st.data(), chunks=st.integers(1, 4))
    def hear_chunks(self, data: st.DataObject, chunks: int) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.growing()), min_size=1, unique=True))
        for _ in range(chunks):
            self.prepare(ids)
            prepared = [stream_id for stream_id in ids if self.models[stream_id].is_prepared]
            if prepared:
                self.write_and_commit(prepared, [self.config.chunk_size] * len(prepared))
            self.everything_adds_up()

    def growing(self) -> list[StreamId]:
        return [stream_id for stream_id, model in self.models.items() if not model.is_sealed]

    def prepare(self, ids: list[StreamId]) -> None:
        free_before = self.pool.num_free_blocks
        expected = self.expected_prepare_error(ids)
        if expected is not None:
            with pytest.raises(expected):
                self.attention.prepare_chunks_batched(ids)
            assert self.pool.num_free_blocks == free_before
            return
        self.attention.prepare_chunks_batched(ids)
        for stream_id in ids:
            self.models[stream_id].is_prepared = self.models[stream_id].was_prepared = True

    def expected_prepare_error(self, ids: list[StreamId]) -> type[Exception] | None:
        if any(stream_id not in self.models for stream_id in ids):
            return UnknownStreamError
        if len(set(ids)) < len(ids):
            return StreamStateError
        for stream_id in ids:
            if self.models[stream_id].is_sealed:
                return StreamStateError
            if self.attention.at_capacity(stream_id):
                return PoolExhaustedError
        return None

    @precondition(lambda self: any(model.is_prepared for model in self.models.values()))
    @rule(data=st.data())
    def commit_ragged(self, data: st.DataObject) -> None:
        ready = [sid for sid, model in self.models.items() if model.is_prepared]
        ids = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        chunk = self.config.chunk_size
        counts = [
            chunk if data.draw(st.integers(0, 7)) else data.draw(st.integers(0, chunk)) for _ in ids
        ]
        self.write_and_commit(ids, counts)

    def write_and_commit(self, ids: list[StreamId], counts: list[int]) -> None:
        chunk = self.config.chunk_size
        slots = [self.models[stream_id].slot for stream_id in ids] + self.attention.pad_slots
        caches, _, _ = self.attention.get_batched_paged_caches(
            slots, chunk_frames=chunk,
            num_new_B=torch.tensor(counts + [chunk] * len(self.attention.pad_slots)),
        )  # fmt: skip
        values = self.next_values(len(slots) * chunk).view(len(slots), chunk, HEADS, DIM)
        caches[0].write(values, -values)
        self.check_gathered(
            caches[0], ids, [values[row, :count] for row, count in enumerate(counts)]
        )
        self.attention.commit_chunks_paged_batched(ids, counts)
        for row, (stream_id, count) in enumerate(zip(ids, counts, strict=True)):
            self.commit_model(self.models[stream_id], values[row, :count].flatten().tolist())

    def check_gathered(self, cache: Any, ids: list[StreamId], new: list[Tensor]) -> None:
        k_BKHD, v_BKHD = cache.gather()
        assert torch.equal(k_BKHD, -v_BKHD)
        for row, stream_id in enumerate(ids):
            expected = self.models[stream_id].visible + new[row].flatten().tolist()
            valid_K = cache.layout.valid_BK[row]
            assert k_BKHD[row, valid_K].flatten().tolist() == expected
            if expected:
                assert set(k_BKHD[row].flatten().tolist()) <= set(expected)

    def commit_model(self, model: Model, values: list[float]) -> None:
        model.visible += values
        if self.config.evicts:
            surplus = len(model.visible) - self.config.max_cache_frames
            model.visible = model.visible[max(0, surplus) :]
        model.heard += len(values)
        model.is_prepared = False
        model.is_sealed = len(values) < self.config.chunk_size

    @rule(stream_id=st.sampled_from(IDS), frames=st.integers(1, 4))
    def commit_dense(self, stream_id: StreamId, frames: int) -> None:
        new_kv = self.next_values(frames * 2).view(LAYERS, HEADS, frames, 2 * DIM)
        new_kv[..., 1] = -new_kv[..., 0]
        if stream_id not in self.models:
            return
        model = self.models[stream_id]
        new_cnn = torch.full_like(model.context.get_cnn_cache(), self.written)
        at_capacity = self.attention.at_capacity(stream_id) and not model.is_prepared
        if model.is_sealed or frames > self.config.chunk_size or at_capacity:
            with pytest.raises((StreamStateError, PoolExhaustedError)):
                model.context.commit_chunk(new_kv, new_cnn)
            return
        model.context.commit_chunk(new_kv, new_cnn)
        model.was_prepared = True
        model.conv = self.written
        self.commit_model(model, new_kv[0, 0, :, 0].tolist())

    @rule(stream_id=st.sampled_from(IDS), frames=st.sampled_from([-1, 0, 1, 99]))
    def commit_what_must_not_be(self, stream_id: StreamId, frames: int) -> None:
        model = self.models.get(stream_id)
        if model is None:
            with pytest.raises(UnknownStreamError):
                self.attention.commit_chunk_paged(stream_id, frames)
        elif not model.is_prepared:
            with pytest.raises(StreamNotPreparedError):
                self.attention.commit_chunk_paged(stream_id, frames)
        elif not 0 <= frames <= self.config.chunk_size:
            with pytest.raises(StreamStateError):
                self.attention.commit_chunk_paged(stream_id, frames)

    @rule(blocks=st.lists(st.integers(-1, 60), min_size=1, max_size=3))
    def free_what_is_not_held_by_the_caller(self, blocks: list[int]) -> None:
        free_ids = set(self.pool.free_block_ids())
        if any(not 0 <= b < self.pool.num_blocks or b in free_ids for b in blocks):
            with pytest.raises(StreamStateError):
                self.pool.free(blocks)

    # Always

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "models"):
            return
        self.attention.check_integrity()
        for stream_id, model in self.models.items():
            assert self.attention.slot_of(stream_id) == model.slot
            assert self.attention.cached_frames([stream_id]) == len(model.visible)
            self.check_dense_view(stream_id, model)
            self.check_position(stream_id, model)
            assert (model.context.get_cnn_cache() == model.conv).all()
            if not model.was_prepared:
                with pytest.raises(StreamNotPreparedError):
                    self.attention.get_paged_caches(stream_id)

    def check_dense_view(self, stream_id: StreamId, model: Model) -> None:
        packed = self.attention.get_stacked_cache(stream_id)
        if not model.visible:
            assert packed.shape == (0, 0, 0, 0)
            return
        assert packed[0, 0, :, 0].tolist() == model.visible
        assert packed[0, 0, :, 1].tolist() == [-value for value in model.visible]

    def check_position(self, stream_id: StreamId, model: Model) -> None:
        (position,) = self.attention.position_offsets([stream_id])
        assert position >= len(model.visible)
        if self.config.evicts and model.heard + self.config.chunk_size > POSITION_LIMIT:
            assert position <= POSITION_LIMIT
        else:
            assert position == model.heard

    def next_values(self, count: int) -> Tensor:
        values = self.written + 1 + torch.arange(count, dtype=torch.float64)
        self.written = float(values[-1])
        return values


@dataclass
class Row:
    """What an open slot has heard since its last reset, and what its states should hold."""

    heard: list[float]
    total: float = 0.0
    prompt: float = 0.0
    is_sealed: bool = False
    num_evicted: int = 0


class SlotMachine(RuleBasedStateMachine):
    """`KvStore` and `SlotStates` as a step uses them: distinct slots, in arrays, on trust."""

    SPECS = (StreamStateSpec("total", (2,)), StreamStateSpec("prompt", (1,), persistent=True))

    @initialize(config=configs())
    def build(self, config: CacheConfig) -> None:
        self.config = config
        scratch = config.peak_blocks or 1
        self.store = KvStore(config, pad_lanes=1, pool=PoisonedPool(config, scratch))
        self.states = PoisonedStates(
            self.SPECS, MAX_STREAMS, config.device, dtype=config.dtype, extra_slots=1
        )
        self.rows: dict[int, Row] = {}
        self.written = 0.0

    def new_row(self, prompt: float) -> Row:
        frames = self.config.prefilled_cache_frames
        return Row(heard=[0.0] * frames, prompt=prompt)

    def visible(self, row: Row) -> list[float]:
        """The tail of the whole history, by the meaning of the config's two bounds."""
        bound = self.config.window_frames
        if bound is None and self.config.num_left_chunks >= 0:
            bound = self.config.num_left_chunks * self.config.chunk_size
        first = row.num_evicted if bound is None else max(row.num_evicted, len(row.heard) - bound)
        return row.heard[first:]

    @rule(slot=st.integers(0, MAX_STREAMS - 1))
    def open_or_close(self, slot: int) -> None:
        if slot in self.rows:
            del self.rows[slot]
            self.store.close(slot)
            self.states.close(slot)
            return
        self.store.open(slot)
        self.states.open(slot)
        self.written += 1
        self.states.fill_slot("prompt", slot, self.written)
        self.rows[slot] = self.new_row(self.written)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.store.reset(slot)
        self.states.reset(slot)
        self.rows[slot] = self.new_row(self.rows[slot].prompt)

    def growing(self) -> list[int]:
        return [slot for slot, row in self.rows.items() if not row.is_sealed]

    @precondition(lambda self: self.growing())
    @rule(data=st.data(), num_steps=st.integers(1, 5), upload=st.booleans())
    def hear(self, data: st.DataObject, num_steps: int, upload: bool) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.growing()), min_size=1, unique=True))
        is_last = data.draw(st.integers(0, 4)) == 0
        chunk = self.config.chunk_size
        for step in range(num_steps):
            if not self.prepare(np.array(slots)):
                return
            counts = [chunk] * len(slots)
            if is_last and step == num_steps - 1:
                counts = [data.draw(st.integers(0, chunk)) for _ in slots]
            self.run_step(slots, counts, upload=upload)

    def prepare(self, slots_B: IntArray) -> bool:
        """Whether all of the rows got room; when not, nothing has changed."""
        missing = int(self.store.rows.missing_blocks(slots_B).sum())
        can_grow = not self.store.at_capacity(slots_B).any()
        free_before = self.store.pool.free_block_ids()
        if not can_grow or missing > len(free_before):
            assert not self.config.evicts, "a pool of the peaks never runs dry"
            with pytest.raises(PoolExhaustedError):
                self.store.prepare(slots_B)
            assert self.store.pool.free_block_ids() == free_before
            return False
        self.store.prepare(slots_B)
        assert self.store.pool.free_block_ids() == free_before[missing:]
        self.store.prepare(slots_B)
        assert self.store.pool.num_free_blocks == len(free_before) - missing
        return True

    def run_step(self, slots: list[int], counts: list[int], *, upload: bool) -> None:
        """The rows and one that pads them; frames past a row's count are garbage."""
        chunk = self.config.chunk_size
        slots_B, frames_B = np.array(slots), np.array(counts)
        slots_W = torch.tensor([*slots, self.store.pad_slot])
        assert self.store.pad_slot == self.states.pad_slot
        (cache,) = self.store.views(
            slots_W,
            num_new_W=torch.tensor([*counts, chunk]),
            history_frames=self.store.history_frames(slots_B),
        )
        new_WT = self.written + 1 + torch.arange(len(slots_W) * chunk).view(-1, chunk).double()
        self.written = float(new_WT[-1, -1])
        cache.write(new_WT[..., None, None], -new_WT[..., None, None])
        k_WKHD, v_WKHD = cache.gather()
        assert torch.equal(k_WKHD, -v_WKHD)
        total = self.states.staged_views(slots_W)["total"]
        old_W2 = total.gather()
        total.scatter(old_W2 + new_WT[:, :1])
        for index, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            row = self.rows[slot]
            new = new_WT[index, :count].tolist()
            expected = self.visible(row) + new
            columns = k_WKHD[index].flatten().tolist()
            assert columns[: len(expected)] == expected
            assert not expected or set(columns) == set(expected)
            assert old_W2[index].tolist() == [row.total] * 2
            row.heard += new
            row.total += float(new_WT[index, 0])
            row.is_sealed = count < chunk
        total.store()
        self.store.commit(slots_B, frames_B, upload=upload)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.integers(-1, 12))
    def evict(self, data: st.DataObject, keep: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[slot]
        self.store.evict(np.array([slot]), keep)
        if keep >= 0:
            row.num_evicted = max(row.num_evicted, len(row.heard) - keep)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "rows"):
            return
        self.store.check_integrity(list(self.rows))
        slots_B = np.array(sorted(self.rows), dtype=np.int64)
        visible = [len(self.visible(self.rows[slot])) for slot in slots_B]
        assert self.store.history_frames(slots_B) == max(visible, default=0)
        positions_B = self.store.position_offsets(slots_B)
        assert (self.store.first_key_positions(slots_B) == positions_B - visible).all()
        for slot, position, seen in zip(slots_B, positions_B, visible, strict=True):
            row = self.rows[slot]
            heard = len(row.heard)
            if not self.config.evicts or heard + self.config.chunk_size <= POSITION_LIMIT:
                assert position == heard
            assert seen <= position
            assert not self.config.evicts or position <= POSITION_LIMIT
            assert self.states.row_of("total", slot).tolist() == [[row.total] * 2]
            assert self.states.row_of("prompt", slot).tolist() == [[row.prompt]]


CacheMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=STEPS_PER_EXAMPLE
)
TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)

SlotMachine.TestCase.settings = CacheMachine.TestCase.settings
TestSlotMachine = pytest.mark.slow(SlotMachine.TestCase)
