"""What `KvStore` does by itself: it makes a pool, names a lane, and guards its table rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from oasr_backend.cache import CacheConfig, KvStore, SlotStates
from oasr_backend.errors import ConfigError, PoolExhaustedError


def make_config(**changes: Any) -> CacheConfig:
    fields: dict[str, Any] = {
        "num_layers": 1, "n_kv_head": 1, "head_dim": 2, "hidden_dim": 1, "kernel_size": 2,
        "chunk_size": 4, "block_size_frames": 6, "num_left_chunks": 2, "max_num_blocks": 9,
        "max_blocks_per_seq": 3, "max_batch_size": 3, "dtype": torch.float32,
        "device": torch.device("cpu"),
    }  # fmt: skip
    return CacheConfig(**{**fields, **changes})


def test_a_store_makes_scratch_blocks_for_the_widest_step_of_its_lanes() -> None:
    config = make_config()
    store = KvStore(config, pad_lanes=2)
    assert config.peak_blocks == 3
    assert store.pool.scratch_block_ids == [9, 10, 11, 12, 13, 14]
    assert store.pad_slot == store.pad_slots[0] == 3
    assert not set(store.tables.block_table[3].tolist()) & set(store.tables.block_table[4].tolist())


def test_a_store_without_a_lane_says_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match="pad_lanes=1"):
        _ = KvStore(make_config()).pad_slot
    with pytest.raises(ConfigError, match="extra_slots=1"):
        _ = SlotStates((), 3, torch.device("cpu")).pad_slot


def test_an_unlimited_row_never_runs_into_the_next_row_of_the_table() -> None:
    """The pool has blocks left; the row has not."""
    store = KvStore(make_config(num_left_chunks=-1))
    slots_B, frames_B = np.array([1]), np.array([4])
    while not store.at_capacity(slots_B).any():
        store.prepare(slots_B)
        store.commit(slots_B, frames_B)
    assert store.pool.num_free_blocks == 6
    assert store.history_frames(slots_B) == 16
    with pytest.raises(PoolExhaustedError, match=r"history of slot 1 .* num_left_chunks"):
        store.prepare(slots_B)
    store.check_integrity([1])


def test_one_silent_row_does_not_hold_up_the_others() -> None:
    store = KvStore(make_config(num_left_chunks=-1))
    for _ in range(4):
        store.prepare(np.array([1]))
        store.commit(np.array([1]), np.array([4]))
    assert store.at_capacity(np.array([0, 1, 2])).tolist() == [False, True, False]


def test_what_a_commit_did_not_upload_reaches_the_device_with_the_next_prepare() -> None:
    store = KvStore(make_config())
    slots_B = np.array([0, 2])
    store.prepare(slots_B)
    store.commit(slots_B, np.array([4, 4]), upload=False)
    assert store.tables.cache_seqlens.tolist() == [0, 0, 0]
    store.prepare(slots_B)
    assert store.tables.cache_seqlens.tolist() == [4, 0, 4]
