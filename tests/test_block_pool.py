"""BlockPool: a fixed set of blocks, each free or held once."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from oasr_backend.cache import BlockPool, CacheConfig, bytes_per_kv_block
from oasr_backend.errors import ConfigError, PoolExhaustedError, StreamStateError


def make_pool(scratch_blocks: int = 0, *, reuses_first: bool = False, **changes: Any) -> BlockPool:
    fields: dict[str, Any] = {
        "num_layers": 2, "n_kv_head": 3, "head_dim": 4, "chunk_size": 2, "block_size_frames": 5,
        "max_num_blocks": 6, "max_batch_size": 2, "device": torch.device("cpu"),
        "dtype": torch.float32,
    }  # fmt: skip
    config = CacheConfig(**{**fields, **changes})
    return BlockPool(config, scratch_blocks, reuses_first=reuses_first)


def test_a_new_pool_is_free_and_zero() -> None:
    pool = make_pool()
    assert pool.num_free_blocks == pool.num_blocks == 6
    for layer in range(2):
        for k_or_v in pool.get_kv_view(layer):
            assert k_or_v.shape == (6, 5, 3, 4)
            assert not k_or_v.any()
    pool.check_integrity()


def test_blocks_are_unique_and_the_oldest_freed_comes_first() -> None:
    pool = make_pool()
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]
    pool.free([4, 1])
    pool.free([3])
    pool.check_integrity()
    assert pool.allocate(3) == [4, 1, 3]


def test_returned_blocks_come_before_new_ones_where_that_is_asked_for() -> None:
    pool = make_pool(reuses_first=True)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([2, 0])
    assert pool.free_block_ids() == [2, 0, 3, 4, 5]
    pool.check_integrity()
    assert pool.allocate(1) == [2]
    pool.free([2])
    assert pool.allocate(3) == [0, 2, 3], "of those that came back the oldest is first"
    assert pool.free_block_ids() == [4, 5]
    pool.free([3, 1])
    assert pool.allocate(4) == [3, 1, 4, 5]
    pool.check_integrity()


@pytest.mark.parametrize("reuses_first", [False, True])
def test_every_block_is_handed_out_once_whatever_the_order(reuses_first: bool) -> None:
    pool, held, chance = make_pool(reuses_first=reuses_first), list[int](), random.Random(5)
    for _ in range(500):
        if chance.random() < 0.5:
            held += pool.allocate(chance.randint(0, pool.num_free_blocks))
        else:
            chance.shuffle(held)
            back, held = held[: len(held) // 2], held[len(held) // 2 :]
            pool.free(back)
        assert len(set(held)) == len(held)
        assert sorted([*held, *pool.free_block_ids()]) == [0, 1, 2, 3, 4, 5]
        pool.check_integrity()


@pytest.mark.parametrize("bad", [0, 3])
def test_a_new_block_cannot_be_freed(bad: int) -> None:
    pool = make_pool(reuses_first=True)
    pool.free(pool.allocate(1))
    with pytest.raises(StreamStateError, match=f"block {bad} is already free"):
        pool.free([bad])


@pytest.mark.parametrize("reuses_first", [False, True])
def test_nothing_is_taken_when_too_few_are_free(reuses_first: bool) -> None:
    pool = make_pool(reuses_first=reuses_first)
    pool.allocate(4)
    with pytest.raises(PoolExhaustedError, match="requested 3, only 2 of 6 are free"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2


def test_taking_or_freeing_none_is_a_no_op() -> None:
    pool = make_pool()
    assert pool.allocate(0) == []
    pool.free([])
    assert pool.num_free_blocks == 6


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(StreamStateError, match="-1"):
        make_pool().allocate(-1)


@pytest.mark.parametrize("bad", [[0, 0], [0, 5], [0, 6], [0, -1], [0, 7]])
def test_freeing_twice_or_what_is_not_the_pools_frees_nothing(bad: list[int]) -> None:
    pool = make_pool(scratch_blocks=2)
    pool.allocate(3)
    with pytest.raises(StreamStateError):
        pool.free(bad)
    assert pool.num_free_blocks == 3
    pool.check_integrity()


def test_scratch_blocks_exist_and_are_never_handed_out() -> None:
    pool = make_pool(scratch_blocks=2)
    assert pool.scratch_block_ids == [6, 7]
    assert pool.get_kv_view(0)[0].shape[0] == pool.num_total_blocks == 8
    assert max(pool.allocate(6)) == 5
    with pytest.raises(PoolExhaustedError):
        pool.allocate(1)
    with pytest.raises(ConfigError):
        make_pool(scratch_blocks=-1)


def test_views_write_through_and_layers_are_apart() -> None:
    pool = make_pool()
    k_block, v_block = pool.get_kv_block_view(1, 3)
    k_block.fill_(1)
    v_block.fill_(2)
    assert (pool.get_kv_view(1)[0][3] == 1).all()
    assert (pool.get_kv_view(1)[1][3] == 2).all()
    assert not pool.get_kv_view(0)[0].any()


def test_gathering_follows_the_order_of_the_ids() -> None:
    pool = make_pool()
    for block in range(6):
        pool.get_kv_block_view(0, block)[0].fill_(block)
    k_FHD, v_FHD = pool.gather_kv_blocks(0, [4, 1])
    assert k_FHD.shape == v_FHD.shape == (10, 3, 4)
    assert k_FHD[:, 0, 0].tolist() == [4.0] * 5 + [1.0] * 5
    assert pool.gather_kv_blocks(0, [])[0].shape == (0, 3, 4)


def test_zeroing_blanks_the_named_blocks_in_every_layer() -> None:
    pool = make_pool()
    for layer in range(2):
        for k_or_v in pool.get_kv_view(layer):
            k_or_v.fill_(float("nan"))
    pool.zero_blocks([1, 4])
    pool.zero_blocks([])
    for layer in range(2):
        for k_or_v in pool.get_kv_view(layer):
            finite = [bool(block.isfinite().all()) for block in k_or_v]
            assert finite == [False, True, False, False, True, False]


def test_the_stated_bytes_are_the_allocated_ones() -> None:
    pool = make_pool()
    per_block = bytes_per_kv_block(
        num_layers=2, block_size_frames=5, n_kv_head=3, head_dim=4, dtype=torch.float32
    )
    assert sum(pool.get_kv_view(layer)[i].nbytes for layer in (0, 1) for i in (0, 1)) == (
        6 * per_block
    )


@pytest.mark.parametrize("reuses_first", [False, True])
def test_threads_never_share_a_block(reuses_first: bool) -> None:
    pool = make_pool(max_num_blocks=64, reuses_first=reuses_first)
    clashes: list[set[int]] = []
    owned: set[int] = set()
    guard = threading.Lock()

    def take_and_return() -> None:
        for _ in range(200):
            blocks = set(pool.allocate(4))
            with guard:
                if owned & blocks:
                    clashes.append(owned & blocks)
                owned.update(blocks)
            with guard:
                owned.difference_update(blocks)
            pool.free(sorted(blocks))

    threads = [threading.Thread(target=take_and_return) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert pool.num_free_blocks == 64
    pool.check_integrity()


def test_a_pool_needs_a_sized_config() -> None:
    with pytest.raises(ConfigError, match="derive_max_num_blocks"):
        make_pool(max_num_blocks=None)


def test_integrity_notices_a_block_that_is_twice_free() -> None:
    pool = make_pool()
    pool._ring[1] = pool._ring[0]
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()


class SeparateLayers(BlockPool):
    """Each layer in tensors of its own, as a subclass may keep them."""

    def _make_storage(self) -> None:
        cfg = self.config
        shape = (self.num_total_blocks, cfg.block_size_frames, cfg.n_kv_head, cfg.head_dim)
        self.layers = [
            (torch.zeros(shape, dtype=cfg.dtype), torch.zeros(shape, dtype=cfg.dtype))
            for _ in range(cfg.num_layers)
        ]

    def get_kv_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[layer]

    def get_kv_block_view(self, layer: int, block_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = self.layers[layer]
        return k_cache[block_id], v_cache[block_id]

    def zero_blocks(self, block_ids: Any) -> None:
        for pair in self.layers:
            for k_or_v in pair:
                k_or_v[torch.as_tensor(block_ids)] = 0


def test_a_subclass_may_store_the_tensors_otherwise() -> None:
    from oasr_backend.cache import AttentionCacheManager

    config = make_pool(num_left_chunks=1, block_size_frames=3).config
    managers = [AttentionCacheManager(kind(config), config) for kind in (BlockPool, SeparateLayers)]
    for manager in managers:
        manager.allocate_stream(0)
    for _ in range(5):
        new_kv = torch.randn(2, 3, 2, 8)
        for manager in managers:
            manager.commit(0, new_kv)
            manager.check_integrity()
        assert torch.equal(*[manager.get_stacked_cache(0) for manager in managers])
