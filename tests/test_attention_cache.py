"""The paged cache against an oracle that keeps whole histories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oasr_backend.cache import (
    AttentionCacheManager,
    BlockPool,
    CacheConfig,
    CnnCacheManager,
    StreamSlotPool,
)
from oasr_backend.errors import (
    ConfigError,
    PoolExhaustedError,
    StreamNotPreparedError,
    StreamStateError,
    UnknownStreamError,
)
from tests.reference.stand_in_model import StandInModel
from tests.rounding import FLOAT64_NETWORK

CPU = torch.device("cpu")


def make_config(**changes: Any) -> CacheConfig:
    fields: dict[str, Any] = {
        "num_layers": 2, "n_kv_head": 2, "head_dim": 3, "hidden_dim": 5, "kernel_size": 3,
        "chunk_size": 4, "num_left_chunks": 2, "block_size_frames": 4, "max_num_blocks": 24,
        "max_blocks_per_seq": 8, "max_batch_size": 4, "device": CPU, "dtype": torch.float64,
    }  # fmt: skip
    return CacheConfig(**{**fields, **changes})


def make_manager(
    scratch_blocks: int = 0, pad_lanes: int = 0, **changes: Any
) -> AttentionCacheManager:
    config = make_config(**changes)
    return AttentionCacheManager(BlockPool(config, scratch_blocks), config, pad_lanes)


def step(manager: AttentionCacheManager, *stream_ids: int | str, frames: int = 4) -> None:
    manager.prepare_chunks_batched(stream_ids)
    manager.check_integrity()
    manager.commit_chunks_paged_batched(stream_ids, frames)
    manager.check_integrity()


# Life of a stream


def test_a_stream_takes_a_slot_and_no_block_before_its_first_chunk() -> None:
    manager = make_manager()
    assert manager.allocate_stream(7) == 0
    assert manager.allocate_stream("7") == 1
    assert manager.pool.num_free_blocks == 24
    manager.check_integrity()


def test_prepare_takes_one_block_and_commits_count_frames() -> None:
    manager = make_manager()
    manager.allocate_stream(1)
    manager.prepare_chunk(1)
    assert manager.pool.num_free_blocks == 23
    assert manager.cached_frames([1]) == 0
    manager.commit_chunk_paged(1, 4)
    assert manager.cached_frames([1]) == 4
    assert manager.get_paged_state_views(1)[1].tolist() == [4]


def test_a_second_prepare_without_a_commit_changes_nothing() -> None:
    manager = make_manager()
    manager.allocate_stream(1)
    manager.prepare_chunk(1)
    manager.prepare_chunk(1)
    assert manager.pool.num_free_blocks == 23


def test_history_is_exactly_the_left_chunks_after_each_commit() -> None:
    for left in (0, 1, 3):
        manager = make_manager(num_left_chunks=left)
        manager.allocate_stream(1)
        for chunk in range(8):
            assert manager.cached_frames([1]) == 4 * min(chunk, left)
            step(manager, 1)


def test_a_pool_sized_to_the_invariant_never_runs_dry_and_is_used_up() -> None:
    for block in (4, 5, 6, 8):
        probe = make_config(block_size_frames=block, max_num_blocks=999)
        exact = probe.blocks_per_stream * 4
        manager = make_manager(block_size_frames=block, max_num_blocks=exact)
        for stream_id in range(4):
            manager.allocate_stream(stream_id)
        least = exact
        for _ in range(40):
            manager.prepare_chunks_batched(range(4))
            least = min(least, manager.pool.num_free_blocks)
            manager.check_integrity()
            manager.commit_chunks_paged_batched(range(4), 4)
        assert least == 0


def test_eviction_drops_the_oldest_block_and_blanks_the_vacated_column() -> None:
    manager = make_manager()
    manager.allocate_stream(1)
    for _ in range(3):
        step(manager, 1)
    table = manager.get_paged_state_views(1)[0]
    assert table[0].tolist() == [1, 2, 0, 0, 0, 0, 0, 0]


def test_batched_steps_equal_single_steps() -> None:
    together, alone = make_manager(), make_manager()
    for stream_id in (3, 1, 2):
        together.allocate_stream(stream_id)
        alone.allocate_stream(stream_id)
    for _ in range(6):
        step(together, 3, 1, 2)
        for stream_id in (3, 1, 2):
            alone.prepare_chunk(stream_id)
        for stream_id in (3, 1, 2):
            alone.commit_chunk_paged(stream_id, 4)
    assert torch.equal(together.store.tables.block_table, alone.store.tables.block_table)
    assert torch.equal(together.store.tables.cache_seqlens, alone.store.tables.cache_seqlens)


def test_a_freed_stream_returns_its_blocks_and_its_slot() -> None:
    manager = make_manager()
    manager.allocate_stream(1)
    step(manager, 1)
    manager.free_stream(1)
    manager.check_integrity()
    assert manager.pool.num_free_blocks == 24
    assert manager.store.tables.cache_seqlens.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("left", ["position", "is_sealed", "num_blocks"])
def test_integrity_notices_what_a_freed_stream_left_in_its_slot(left: str) -> None:
    manager = make_manager()
    manager.allocate_stream(1)
    manager.free_stream(1)
    owner = manager._rules if left == "is_sealed" else manager.store.rows
    getattr(owner, left)[0] = 1
    with pytest.raises(AssertionError, match="not new"):
        manager.check_integrity()


def test_reset_keeps_the_slot_and_leaves_the_neighbour_alone() -> None:
    manager = make_manager()
    manager.allocate_stream("a")
    manager.allocate_stream("b")
    for _ in range(4):
        step(manager, "a", "b")
    manager.reset_stream("a")
    manager.check_integrity()
    assert manager.slot_of("a") == 0
    assert manager.cached_frames(["a"]) == 0
    assert manager.cached_frames(["b"]) == 8
    assert manager.position_offsets(["a", "b"]) == [0, 16]
    with pytest.raises(StreamNotPreparedError):
        manager.get_paged_caches("a")


def test_managers_with_one_slot_pool_give_a_stream_the_same_slot() -> None:
    config, slots = make_config(), StreamSlotPool(4)
    attention = AttentionCacheManager(BlockPool(config), config, slot_pool=slots)
    convolution = CnnCacheManager(config, slot_pool=slots)
    attention.allocate_stream("a")
    assert attention.allocate_stream("b") == convolution.allocate_stream("b") == 1
    attention.free_stream("b")
    assert slots.num_free_slots == 2
    convolution.free_stream("b")
    assert slots.num_free_slots == 3


def test_a_named_slot_is_taken_and_bad_ones_are_refused() -> None:
    manager = make_manager(pad_lanes=1, scratch_blocks=1)
    assert manager.allocate_stream("a", 2) == 2
    for slot, message in ((2, "in use"), (4, "out of range"), (-1, "out of range")):
        with pytest.raises(StreamStateError, match=message):
            manager.allocate_stream("b", slot)
    assert [manager.allocate_stream(n) for n in range(3)] == [0, 1, 3]
    with pytest.raises(PoolExhaustedError):
        manager.allocate_stream("late")
    manager.check_integrity()


# Refusals


@pytest.mark.parametrize("left", [-1, 2])
def test_a_batched_prepare_with_an_unknown_or_repeated_id_changes_nothing(left: int) -> None:
    manager = make_manager(num_left_chunks=left)
    manager.allocate_stream(0)
    for bad, error in (([0, 9], UnknownStreamError), ([0, 0], StreamStateError)):
        with pytest.raises(error):
            manager.prepare_chunks_batched(bad)
        assert manager.pool.num_free_blocks == 24
        manager.check_integrity()


def test_a_batched_prepare_without_enough_blocks_changes_nothing() -> None:
    manager = make_manager(num_left_chunks=-1, max_num_blocks=4, max_batch_size=2)
    manager.allocate_stream(0)
    manager.allocate_stream(1)
    step(manager, 0, 1)
    manager.pool.allocate(1)
    with pytest.raises(PoolExhaustedError, match="requested 2, only 1 of 4"):
        manager.prepare_chunks_batched([0, 1])
    assert manager.pool.num_free_blocks == 1
    with pytest.raises(StreamNotPreparedError):
        manager.commit_chunk_paged(0, 4)


def test_no_chunk_follows_a_short_one_until_the_reset() -> None:
    manager = make_manager()
    manager.allocate_stream(0)
    manager.allocate_stream(1)
    manager.prepare_chunks_batched([0, 1])
    manager.commit_chunks_paged_batched([0, 1], [3, 4])
    with pytest.raises(StreamStateError, match="reset or free"):
        manager.prepare_chunks_batched([1, 0])
    manager.check_integrity()
    manager.reset_stream(0)
    step(manager, 0, 1)


@pytest.mark.parametrize("frames", [-1, 5, [4], [4, 5]])
def test_a_commit_of_impossible_frames_changes_nothing(frames: Any) -> None:
    manager = make_manager()
    manager.allocate_stream(0)
    manager.allocate_stream(1)
    manager.prepare_chunks_batched([0, 1])
    with pytest.raises(StreamStateError):
        manager.commit_chunks_paged_batched([0, 1], frames)
    assert manager.cached_frames([0, 1]) == 0
    manager.commit_chunks_paged_batched([0, 1], 4)


def test_a_commit_needs_a_prepare_of_its_own() -> None:
    manager = make_manager()
    manager.allocate_stream(0)
    with pytest.raises(StreamNotPreparedError):
        manager.commit_chunk_paged(0, 4)
    step(manager, 0)
    with pytest.raises(StreamNotPreparedError):
        manager.commit_chunk_paged(0, 4)


def test_a_layout_wider_than_the_room_is_refused() -> None:
    manager = make_manager()
    with pytest.raises(StreamStateError, match="chunk_frames=5"):
        manager.get_batched_paged_caches([0], chunk_frames=5)


# Capacity and positions


def test_an_unlimited_stream_is_at_capacity_before_its_prepare_fails() -> None:
    manager = make_manager(num_left_chunks=-1, max_num_blocks=8, max_batch_size=2)
    manager.allocate_stream(0)
    manager.allocate_stream(1)
    for _ in range(4):
        assert not manager.at_capacity(0)
        step(manager, 0)
    assert manager.at_capacity(0)
    assert not manager.at_capacity(1)
    assert manager.cached_frames([0]) == manager.config.max_stream_frames
    with pytest.raises(PoolExhaustedError, match="num_left_chunks"):
        manager.prepare_chunk(0)


def test_packed_frames_use_all_of_the_advertised_ceiling() -> None:
    manager = make_manager(num_left_chunks=-1, block_size_frames=8, max_num_blocks=8)
    manager.allocate_stream(0)
    heard = 0
    while not manager.at_capacity(0):
        step(manager, 0)
        heard += 4
    assert heard == manager.config.max_stream_frames == 16


def test_a_bounded_stream_is_never_at_capacity() -> None:
    manager = make_manager()
    manager.allocate_stream(0)
    for _ in range(40):
        assert not manager.at_capacity(0)
        step(manager, 0)


def test_positions_count_frames_until_the_limit_and_then_restart_at_the_window() -> None:
    manager = make_manager(position_limit_frames=20)
    manager.allocate_stream(0)
    positions = []
    for _ in range(12):
        manager.prepare_chunk(0)
        positions += manager.position_offsets([0])
        manager.commit_chunk_paged(0, 4)
    assert positions == [0, 4, 8, 12, 16, 8, 12, 16, 8, 12, 16, 8]


def test_positions_of_unlimited_history_are_the_frames_heard() -> None:
    manager = make_manager(num_left_chunks=-1, position_limit_frames=8)
    manager.allocate_stream(0)
    for chunk in range(6):
        manager.prepare_chunk(0)
        assert manager.position_offsets([0]) == [4 * chunk]
        manager.commit_chunk_paged(0, 4)


def test_explicit_eviction_keeps_as_many_chunks_as_asked() -> None:
    manager = make_manager(num_left_chunks=-1)
    manager.allocate_stream(0)
    for _ in range(5):
        step(manager, 0)
    manager.evict_oldest_batched([0])
    assert manager.cached_frames([0]) == 20
    manager.evict_oldest_batched([0], keep_chunks=2)
    manager.check_integrity()
    assert manager.cached_frames([0]) == 8
    assert manager.pool.num_free_blocks == 22


# Padding lanes


def test_a_lane_names_scratch_blocks_only_and_no_stream_gets_one() -> None:
    manager = make_manager(scratch_blocks=1, pad_lanes=1)
    assert manager.pad_slots == [4]
    assert manager.pool.scratch_block_ids == [24]
    assert manager.store.tables.block_table[4].tolist() == [24] * 8
    for stream_id in range(4):
        manager.allocate_stream(stream_id)
    for _ in range(5):
        step(manager, *range(4))
    assert not (manager.store.tables.block_table[:4] == 24).any()
    assert manager.store.tables.block_table[4].tolist() == [24] * 8


def test_lanes_share_out_the_scratch_blocks() -> None:
    manager = make_manager(scratch_blocks=4, pad_lanes=2)
    assert manager.store.tables.block_table[4].tolist() == [24, 26] * 4
    assert manager.store.tables.block_table[5].tolist() == [25, 27] * 4


def test_lanes_without_scratch_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="scratch_blocks=2"):
        make_manager(pad_lanes=2)


def test_a_lane_reports_the_length_of_a_new_stream() -> None:
    manager = make_manager(scratch_blocks=1, pad_lanes=1, prefill_kv_window=True)
    assert manager.store.tables.cache_seqlens.tolist() == [0, 0, 0, 0, 8]


# A prefilled window


@pytest.mark.parametrize("block", [4, 6, 8])
def test_a_prefilled_stream_reports_its_whole_window_at_every_chunk(block: int) -> None:
    manager = make_manager(prefill_kv_window=True, block_size_frames=block)
    manager.allocate_stream(0)
    for _ in range(9):
        assert manager.cached_frames([0]) == 8
        step(manager, 0)
    manager.reset_stream(0)
    assert manager.cached_frames([0]) == 8
    manager.check_integrity()


def test_a_prefilled_window_is_zero_in_used_blocks_too() -> None:
    manager = make_manager(prefill_kv_window=True, max_num_blocks=12)
    for k_or_v in manager.pool.get_kv_view(1):
        k_or_v.fill_(float("nan"))
    manager.allocate_stream(0)
    assert torch.equal(manager.get_stacked_cache(0), torch.zeros(2, 2, 8, 6).double())


# What the model reads


def run_chunk(
    model: StandInModel, manager: AttentionCacheManager, cnn: CnnCacheManager,
    rows: list[tuple[int, Tensor]],
) -> list[Tensor]:  # fmt: skip
    """One ragged batched step; rows are (stream id, frames (T, D)) with T <= chunk_size."""
    ids = [stream_id for stream_id, _ in rows]
    counts = [frames.shape[0] for _, frames in rows]
    manager.prepare_chunks_batched(ids)
    manager.check_integrity()
    xs = torch.nn.utils.rnn.pad_sequence([frames for _, frames in rows], batch_first=True)
    slots = [manager.slot_of(stream_id) for stream_id in ids]
    caches, _, _ = manager.get_batched_paged_caches(
        slots, chunk_frames=xs.shape[1], num_new_B=torch.tensor(counts)
    )
    view = cnn.views([cnn.slot_of(stream_id) for stream_id in ids])["conv"]
    log_probs, new_cnn = model.forward_chunk_paged(
        xs, torch.tensor(manager.position_offsets(ids)), caches, view.gather(),
        cache_t1=manager.cached_frames(ids),
    )  # fmt: skip
    view.scatter(new_cnn)
    manager.commit_chunks_paged_batched(ids, counts)
    manager.check_integrity()
    return [row[:count] for row, count in zip(log_probs, counts, strict=True)]


@st.composite
def geometries(draw: st.DrawFn) -> CacheConfig:
    chunk = draw(st.integers(1, 5))
    block = draw(st.integers(chunk, 4 * chunk))
    left = draw(st.sampled_from([-1, 0, 1, 4, 9]))
    window = draw(st.none() | st.integers(0, 4 * chunk)) if left < 0 else None
    config = make_config(
        chunk_size=chunk, block_size_frames=block, num_left_chunks=left, window_frames=window,
        n_kv_head=draw(st.sampled_from([1, 2])), max_blocks_per_seq=64, max_num_blocks=None,
        max_batch_size=3,
    )  # fmt: skip
    return replace(config, max_num_blocks=3 * (config.peak_blocks or 20))


@pytest.mark.numerics
@settings(max_examples=60)
@given(config=geometries(), data=st.data())
def test_ragged_batches_equal_the_oracle_for_any_geometry(
    config: CacheConfig, data: st.DataObject
) -> None:
    manager = AttentionCacheManager(BlockPool(config), config)
    cnn = CnnCacheManager(config)
    model = StandInModel(config, num_heads=2 * config.n_kv_head)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    heard: dict[int, list[Tensor]] = {}
    said: dict[int, list[Tensor]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        ids = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        rows = []
        for stream_id in ids:
            if stream_id not in heard:
                manager.allocate_stream(stream_id)
                cnn.allocate_stream(stream_id)
                heard[stream_id], said[stream_id] = [], []
            elif heard[stream_id][-1].shape[1] < config.chunk_size:
                continue
            short = data.draw(st.integers(0, 9)) == 0
            frames = data.draw(st.integers(1, config.chunk_size)) if short else config.chunk_size
            rows.append((stream_id, torch.randn(frames, config.hidden_dim, dtype=torch.float64)))
        if not rows:
            continue
        for (stream_id, frames), output in zip(
            rows, run_chunk(model, manager, cnn, rows), strict=True
        ):
            heard[stream_id].append(frames.unsqueeze(0))
            said[stream_id].append(output)
    for stream_id, chunks in heard.items():
        outputs = model.offline(chunks, config.num_left_chunks, config.window_frames)
        expected = torch.cat(outputs, dim=1)[0]
        torch.testing.assert_close(
            torch.cat(said[stream_id]), expected, atol=FLOAT64_NETWORK, rtol=0
        )


@pytest.mark.numerics
def test_a_lane_beside_live_rows_changes_no_output() -> None:
    manager = make_manager(scratch_blocks=2, pad_lanes=1)
    cnn = CnnCacheManager(manager.config, extra_slots=1)
    model = StandInModel(manager.config)
    manager.allocate_stream(0)
    cnn.allocate_stream(0)
    chunks = [torch.randn(1, 4, 5, dtype=torch.float64) for _ in range(6)]
    expected = model.offline(chunks, 2)
    for chunk, output in zip(chunks, expected, strict=True):
        manager.prepare_chunk(0)
        slots = [0, *manager.pad_slots, *manager.pad_slots]
        caches, _, _ = manager.get_batched_paged_caches(slots, chunk_frames=4)
        view = cnn.views(slots)["conv"]
        xs = torch.cat((chunk, torch.zeros(2, 4, 5, dtype=torch.float64)))
        log_probs, new_cnn = model.forward_chunk_paged(
            xs, torch.tensor([*manager.position_offsets([0]), 0, 0]), caches, view.gather(),
            cache_t1=manager.cached_frames([0]),
        )  # fmt: skip
        view.scatter(new_cnn)
        manager.commit_chunk_paged(0, 4)
        manager.check_integrity()
        torch.testing.assert_close(log_probs[:1], output, atol=FLOAT64_NETWORK, rtol=0)


# Dense mode


def test_dense_commits_keep_exactly_the_left_chunks() -> None:
    for block in (4, 6, 8):
        manager = make_manager(block_size_frames=block)
        manager.allocate_stream(0)
        assert manager.get_stacked_cache(0).shape == (0, 0, 0, 0)
        chunks = [torch.randn(2, 2, 4, 6, dtype=torch.float64) for _ in range(7)]
        for count, chunk in enumerate(chunks, start=1):
            manager.commit(0, chunk)
            manager.check_integrity()
            expected = torch.cat(chunks[max(0, count - 2) : count], dim=2)
            assert torch.equal(manager.get_stacked_cache(0), expected)
            assert torch.equal(manager.get_cache_view(0, 1), expected[1:])


@pytest.mark.parametrize(
    "shape", [(3, 2, 4, 6), (2, 1, 4, 6), (2, 2, 4, 3), (2, 2, 5, 6), (2, 2, 0, 6), (2, 2, 4)]
)
def test_a_dense_commit_of_the_wrong_shape_changes_nothing(shape: tuple[int, ...]) -> None:
    manager = make_manager()
    manager.allocate_stream(0)
    with pytest.raises(StreamStateError, match=r"expected"):
        manager.commit(0, torch.zeros(shape))
    assert manager.pool.num_free_blocks == 24


def test_a_chunk_that_was_not_prepared_reaches_no_other_stream() -> None:
    manager = make_manager()
    for stream_id in ("b", "a"):
        manager.allocate_stream(stream_id)
        manager.commit(stream_id, torch.ones(2, 2, 4, 6, dtype=torch.float64))
    with pytest.raises(StreamNotPreparedError, match="'a' has no room"):
        manager.get_paged_caches("a")
    table, lengths = manager.get_paged_state_views("a")
    assert lengths.tolist() == [4]
    assert table.shape[0] == 1
    assert manager.get_stacked_cache("b").unique().tolist() == [1.0]


def test_a_write_beyond_the_chunk_is_refused_before_it_reaches_another_block() -> None:
    manager = make_manager()
    for stream_id in ("b", "a"):
        manager.allocate_stream(stream_id)
        manager.commit(stream_id, torch.ones(2, 2, 4, 6, dtype=torch.float64))
    manager.prepare_chunk("a")
    wide = torch.full((1, 6, 2, 3), 9.0, dtype=torch.float64)
    with pytest.raises(StreamStateError, match=r"6 frames.*room for 4"):
        manager.get_paged_caches("a")[0].write(wide, wide)
    assert manager.get_stacked_cache("b").unique().tolist() == [1.0]


@pytest.mark.parametrize("count", [np.int64(4), torch.tensor(4), np.int32(4)])
def test_any_integer_counts_frames(count: Any) -> None:
    manager = make_manager()
    manager.allocate_stream("a")
    manager.prepare_chunk("a")
    manager.commit_chunk_paged("a", count)
    assert manager.cached_frames(["a"]) == 4


@pytest.mark.parametrize("count", [4.0, 4.5, "4", True])
def test_what_is_no_integer_counts_no_frames(count: Any) -> None:
    manager = make_manager()
    manager.allocate_stream("a")
    manager.prepare_chunk("a")
    with pytest.raises(StreamStateError, match="integer"):
        manager.commit_chunk_paged("a", count)
    assert manager.cached_frames(["a"]) == 0
    manager.commit_chunk_paged("a", 4)


def test_a_pool_of_another_geometry_is_refused() -> None:
    config = make_config()
    with pytest.raises(ConfigError, match="another CacheConfig"):
        AttentionCacheManager(BlockPool(config), make_config(block_size_frames=8))
    with pytest.raises(ConfigError, match="pad_lanes=-1"):
        AttentionCacheManager(BlockPool(config), config, pad_lanes=-1)
