"""Histories that end at one column name the frames that each row's own layout names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasr_backend.cache import CacheConfig, KvStore
from oasr_backend.cache.kv_views import StepCaches

CHUNK, NUM_SLOTS = 4, 3


def make_store(*, num_left_chunks: int, block: int) -> KvStore:
    config = CacheConfig(
        num_layers=2,
        n_kv_head=1,
        head_dim=2,
        chunk_size=CHUNK,
        block_size_frames=block,
        num_left_chunks=num_left_chunks,
        max_num_blocks=64,
        max_blocks_per_seq=16,
        max_batch_size=NUM_SLOTS,
        device=torch.device("cpu"),
        dtype=torch.float32,
        position_limit_frames=200,
    )
    return KvStore(config, pad_lanes=1)


def step_views(store: KvStore, slots: list[int], *, num_new: int = CHUNK) -> StepCaches:
    slots_B = np.array(slots)
    store.prepare(slots_B)
    return store.views(
        torch.tensor([*slots, store.pad_slot]),
        num_new_W=torch.full((len(slots) + 1,), num_new),
        history_frames=store.history_frames(slots_B),
    )


@given(
    steps=st.lists(st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1).map(sorted), min_size=1),
    num_left_chunks=st.sampled_from([0, 1, 3]),
    block=st.integers(CHUNK, 3 * CHUNK),
    num_new=st.integers(1, CHUNK),
)
def test_both_forms_name_the_same_frames(
    steps: list[list[int]], num_left_chunks: int, block: int, num_new: int
) -> None:
    store = make_store(num_left_chunks=num_left_chunks, block=block)
    for slots in steps[:20]:
        views = step_views(store, slots, num_new=num_new)
        index, layout = views.step_index(), views[0].layout
        history_frames = index.read_BH.shape[1]
        assert history_frames == max(1, store.history_frames(np.array(slots)))
        np.testing.assert_array_equal(index.history_B, layout.history_B)
        np.testing.assert_array_equal(index.write_BT.ravel(), layout.write_index_N)
        frames_BK = np.concatenate((index.read_BH, index.write_BT), axis=1)
        for row in range(len(slots) + 1):
            expected = layout.read_index_BK[row][layout.valid_BK[row]]
            np.testing.assert_array_equal(frames_BK[row, index.valid_BK[row]], expected)
            # What is masked is a frame of the row's own blocks.
            blocks = set(views.rows.block_table[row].tolist())
            assert set((frames_BK[row] // block).tolist()) <= blocks
        store.commit(np.array(slots), np.full(len(slots), CHUNK))


def test_the_caches_of_a_step_are_a_sequence_of_layers() -> None:
    store = make_store(num_left_chunks=1, block=CHUNK)
    views = step_views(store, [0])
    assert len(views) == 2
    assert list(views) == [views[0], views[1]] == views[:]
    assert views[0].layout is views[1].layout
    with pytest.raises(IndexError):
        _ = views[2]


def test_the_frames_of_the_pool_are_its_layers() -> None:
    store = make_store(num_left_chunks=1, block=CHUNK)
    frames = store.pool.kv_frames()
    frames[1, 0, 5] = 7.0
    _, v_cache = store.pool.get_kv_view(0)
    assert v_cache[1, 1].unique().tolist() == [7.0]
    assert int((v_cache != 0).sum()) == v_cache[1, 1].numel()
