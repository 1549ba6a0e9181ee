"""The design document's table of error conditions (section 8), row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oasr_backend.cache import (
    AttentionCacheManager,
    BlockPool,
    CacheConfig,
    CnnCacheManager,
    CtcStateCacheManager,
)
from oasr_backend.decoders import GpuDecoderConfig

CONFIG = CacheConfig(
    num_layers=1, n_kv_head=1, head_dim=2, hidden_dim=3, kernel_size=3, chunk_size=4,
    block_size_frames=4, num_left_chunks=1, max_num_blocks=8, max_batch_size=4,
    dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip


def attention() -> AttentionCacheManager:
    return AttentionCacheManager(BlockPool(CONFIG), CONFIG)


def allocations() -> list[tuple[Any, Callable[[int], Any]]]:
    decoders = CtcStateCacheManager(GpuDecoderConfig())
    att, cnn = attention(), CnnCacheManager(CONFIG)
    return [
        (att, att.allocate_stream),
        (cnn, cnn.allocate_stream),
        (decoders, lambda sid: decoders.allocate_stream(sid, batch=1, vocab_size=5)),
    ]


def test_an_exhausted_pool_raises_runtime_error_with_requested_and_free() -> None:
    pool = BlockPool(CONFIG)
    pool.allocate(7)
    with pytest.raises(RuntimeError, match="requested 2, only 1 of 8"):
        pool.allocate(2)


def test_allocating_a_stream_twice_raises_value_error_in_all_managers() -> None:
    for _, allocate in allocations():
        allocate(1)
        with pytest.raises(ValueError, match="already allocated"):
            allocate(1)


def test_an_unknown_or_freed_id_raises_key_error_in_all_managers() -> None:
    for manager, allocate in allocations():
        with pytest.raises(KeyError):
            manager.free_stream(1)
        allocate(1)
        manager.free_stream(1)
        with pytest.raises(KeyError):
            manager.free_stream(1)


def test_every_attention_call_on_an_unknown_id_raises_key_error() -> None:
    manager = attention()
    calls: list[Callable[[], Any]] = [
        lambda: manager.prepare_chunk(1),
        lambda: manager.commit_chunk_paged(1, 4),
        lambda: manager.get_paged_caches(1),
        lambda: manager.get_paged_state_views(1),
        lambda: manager.get_cache_starts_view(1),
        lambda: manager.get_stacked_cache(1),
        lambda: manager.get_cache_view(1, 0),
        lambda: manager.commit(1, torch.zeros(1, 1, 4, 4)),
        lambda: manager.cached_frames([1]),
        lambda: manager.position_offsets([1]),
        lambda: manager.at_capacity(1),
        lambda: manager.reset_stream(1),
        lambda: manager.slot_of(1),
        lambda: manager.evict_oldest_batched([1]),
    ]
    for call in calls:
        with pytest.raises(KeyError, match="stream 1 is not allocated"):
            call()


def test_paged_access_before_the_first_prepare_raises_runtime_error() -> None:
    manager = attention()
    manager.allocate_stream(1)
    for call in (manager.get_paged_caches, manager.get_paged_state_views):
        with pytest.raises(RuntimeError, match="prepare_chunk"):
            call(1)


def test_a_shape_mismatch_raises_value_error_with_both_shapes() -> None:
    manager, convolution = attention(), CnnCacheManager(CONFIG)
    manager.allocate_stream(1)
    convolution.allocate_stream(1)
    with pytest.raises(ValueError, match=r"\(1, 1, 'T', 4\), got \(1, 2, 4, 4\)"):
        manager.commit(1, torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"\(1, 1, 2, 3\), got \(1, 1, 2, 4\)"):
        convolution.update(1, torch.zeros(1, 1, 2, 4))


def test_a_dense_commit_wider_than_a_block_raises_value_error() -> None:
    manager = attention()
    manager.allocate_stream(1)
    with pytest.raises(ValueError, match="block_size_frames=4"):
        manager.commit(1, torch.zeros(1, 1, 5, 4))


def test_eviction_in_a_batch_touches_its_own_rows_only() -> None:
    manager = attention()
    for stream_id in (1, 2):
        manager.allocate_stream(stream_id)
    manager.prepare_chunk(2)
    manager.commit_chunk_paged(2, 4)
    before = manager.get_paged_state_views(2)[0].clone()
    for _ in range(3):
        manager.prepare_chunk(1)
        manager.commit_chunk_paged(1, 4)
    assert torch.equal(manager.get_paged_state_views(2)[0], before)
