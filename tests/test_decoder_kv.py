"""Pages of autoregressive decoders: reserved ceilings, growth by page, no aliasing."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.cache import CacheConfig, DecoderKVCacheManager, PagedDecoderKv
from oasr_backend.cache.decoder_kv import build_decoder_pool
from oasr_backend.errors import PoolExhaustedError, StreamStateError, UnknownStreamError

CONFIG = CacheConfig(
    num_layers=2, n_kv_head=2, head_dim=3, device=torch.device("cpu"), dtype=torch.float64
)


def make_manager(num_blocks: int = 8, page_tokens: int = 4) -> DecoderKVCacheManager:
    return DecoderKVCacheManager(
        build_decoder_pool(CONFIG, page_tokens=page_tokens, num_blocks=num_blocks)
    )


def tokens(rows: int, count: int) -> torch.Tensor:
    return torch.randn(rows, count, 2, 3, dtype=torch.float64)


# Rows


def test_a_page_is_taken_when_a_row_crosses_its_end() -> None:
    manager = make_manager()
    manager.create("a", max_new_tokens=10, prefill_len=3)
    held = []
    for position in range(3, 10):
        assert manager.append_step(["a"]) == [position]
        manager.check_integrity()
        held.append(8 - manager.pool.num_free_blocks)
    assert held == [1, 2, 2, 2, 2, 3, 3]
    assert manager.cache_seqlens(["a"]).tolist() == [10]
    assert manager.block_tables(["a"]).tolist() == [[0, 1, 2]]


def test_rows_of_unequal_length_share_a_padded_table() -> None:
    manager = make_manager()
    manager.create("a", 4, prefill_len=5)
    manager.create("b", 4)
    assert manager.append_step(["b", "a"]) == [0, 5]
    assert manager.block_tables(["a", "b"]).tolist() == [[0, 1], [2, 0]]


def test_admission_reserves_every_rows_ceiling() -> None:
    manager = make_manager()
    manager.create("a", max_new_tokens=20)
    assert manager.reserved_blocks == 5
    assert manager.can_admit(12)
    assert not manager.can_admit(13)
    assert not manager.can_admit(8, num_rows=2)
    with pytest.raises(PoolExhaustedError, match="requested 4, only 3 of 8"):
        manager.create("b", max_new_tokens=13)
    manager.create("b", max_new_tokens=12)
    for _ in range(12):
        manager.append_step(["a", "b"])
        manager.check_integrity()


def test_a_step_past_the_ceiling_changes_nothing() -> None:
    manager = make_manager()
    manager.create("a", 1)
    manager.create("b", 2)
    manager.append_step(["a", "b"])
    with pytest.raises(StreamStateError, match="ceiling of 1"):
        manager.append_step(["b", "a"])
    assert manager.seqlen("b") == 1


def test_row_faults_are_named() -> None:
    manager = make_manager()
    manager.create("a", 1)
    with pytest.raises(StreamStateError, match="already"):
        manager.create("a", 1)
    with pytest.raises(StreamStateError, match="not both 0"):
        manager.create("b", 0)
    with pytest.raises(StreamStateError, match="twice"):
        manager.append_step(["a", "a"])
    with pytest.raises(UnknownStreamError):
        manager.append_step(["a", "z"])
    assert manager.seqlen("a") == 0


def test_freeing_returns_the_pages_and_twice_is_harmless() -> None:
    manager = make_manager()
    manager.create("a", 10, prefill_len=9)
    manager.free("a")
    manager.free("a")
    manager.check_integrity()
    assert manager.pool.num_free_blocks == 8
    assert manager.reserved_blocks == 0


def test_a_row_without_growth_holds_its_extent_from_the_start() -> None:
    manager = make_manager()
    manager.create("cross", 0, prefill_len=9)
    assert manager.reserved_blocks == 3
    assert manager.pool.num_free_blocks == 5
    with pytest.raises(StreamStateError, match="ceiling of 9"):
        manager.append_step(["cross"])


# Groups


def test_a_group_that_does_not_fit_takes_nothing() -> None:
    manager = make_manager()
    with pytest.raises(PoolExhaustedError):
        PagedDecoderKv(manager, 3, max_new_tokens=4, prefill_len=4, cross_tokens=4)
    manager.check_integrity()
    assert manager.pool.num_free_blocks == 8


@settings(max_examples=40)
@given(
    page=st.integers(1, 5), prefill=st.integers(0, 6), steps=st.integers(1, 9),
    rows=st.integers(1, 3), order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_group_reads_what_a_dense_cache_would(
    page: int, prefill: int, steps: int, rows: int, order: Random
) -> None:
    manager = make_manager(num_blocks=99, page_tokens=page)
    group = PagedDecoderKv(manager, rows, max_new_tokens=steps, prefill_len=prefill, cross_tokens=5)
    dense_k, dense_v = tokens(rows, prefill), tokens(rows, prefill)
    cross_k, cross_v = tokens(rows, 5), tokens(rows, 5)
    group.write_prefill(1, dense_k, dense_v)
    group.write_cross(1, cross_k, cross_v)
    for step in range(steps):
        new_k, new_v = tokens(group.num_rows, 1), tokens(group.num_rows, 1)
        assert group.begin_step() == [prefill + step] * group.num_rows
        k_BKHD, v_BKHD, valid_BK = group.append(1, new_k, new_v)
        dense_k, dense_v = torch.cat((dense_k, new_k), 1), torch.cat((dense_v, new_v), 1)
        assert torch.equal(k_BKHD, dense_k)
        assert torch.equal(v_BKHD, dense_v)
        assert valid_BK.all()
        assert all(
            torch.equal(*p) for p in zip(group.gather_cross(1), (cross_k, cross_v), strict=True)
        )
        keep = list(range(group.num_rows))
        order.shuffle(keep)
        keep = keep[: max(1, len(keep) - step % 2)]
        group.select(keep)
        manager.check_integrity()
        dense_k, dense_v = dense_k[keep], dense_v[keep]
        cross_k, cross_v = cross_k[keep], cross_v[keep]
    group.free()
    group.free()
    manager.check_integrity()
    assert manager.pool.num_free_blocks == 99


def test_selecting_a_row_twice_is_refused_and_changes_nothing() -> None:
    manager = make_manager()
    group = PagedDecoderKv(manager, 2, max_new_tokens=4)
    for keep in ([0, 0], [0, 2], [-1]):
        with pytest.raises(StreamStateError, match="select"):
            group.select(keep)
    assert group.num_rows == 2
    assert group.seqlens == [0, 0]


def test_tokens_that_the_rows_were_not_created_for_are_refused() -> None:
    group = PagedDecoderKv(make_manager(), 2, max_new_tokens=4)
    for write in (group.write_prefill, group.write_cross):
        with pytest.raises(StreamStateError, match=r"2 rows \* 0 tokens"):
            write(0, tokens(2, 1), tokens(2, 1))
    with pytest.raises(StreamStateError, match="begin_step"):
        group.append(0, tokens(2, 1), tokens(2, 1))


def test_layers_are_apart() -> None:
    group = PagedDecoderKv(make_manager(), 1, max_new_tokens=2)
    group.begin_step()
    first, second = tokens(1, 1), tokens(1, 1)
    assert torch.equal(group.append(0, first, first)[0], first)
    assert torch.equal(group.append(1, second, second)[0], second)
    assert torch.equal(group.append(0, first, first)[0], first)


def test_rows_that_cannot_be_made_reserve_nothing() -> None:
    manager = make_manager()
    with pytest.raises(StreamStateError, match="prefill_len=-1"):
        PagedDecoderKv(manager, 2, max_new_tokens=4, cross_tokens=-1)
    assert manager.reserved_blocks == 0
    manager.check_integrity()


def test_rows_selected_before_their_prompt_take_it_in_the_new_order() -> None:
    group = PagedDecoderKv(make_manager(), 3, max_new_tokens=4, prefill_len=2)
    group.select([2, 0])
    prompt, token = tokens(2, 2), tokens(2, 1)
    group.write_prefill(0, prompt, prompt)
    group.begin_step()
    k_BKHD, _, _ = group.append(0, token, token)
    assert torch.equal(k_BKHD, torch.cat((prompt, token), dim=1))
