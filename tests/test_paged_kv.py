"""PagedLayout and PagedKVCache against plain indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oasr_backend.cache import PagedKVCache, PagedLayout, PagedRows
from oasr_backend.errors import StreamStateError

BLOCK = 4


def make_rows(starts: list[int] | None = None) -> PagedRows:
    """Row 0: blocks 5, 2 with 6 frames; row 1: blocks 1, 3, 0 with 8 frames."""
    return PagedRows(
        torch.tensor([[5, 2, 0], [1, 3, 4]], dtype=torch.int32),
        torch.tensor([6, 8], dtype=torch.int32),
        BLOCK,
        cache_starts=None if starts is None else torch.tensor(starts, dtype=torch.int32),
    )


def make_cache(rows: PagedRows, **fields: object) -> PagedKVCache:
    pool = torch.arange(6 * BLOCK * 2.0).view(6, BLOCK, 1, 2)
    return PagedKVCache(
        pool.clone(), -pool, rows.block_table, rows.cache_seqlens, block_size=BLOCK,
        cache_starts=rows.cache_starts, **fields,
    )  # fmt: skip


def test_writes_go_behind_each_rows_history() -> None:
    layout = PagedLayout.build(make_rows(), chunk_frames=2, num_frames=10)
    assert layout.write_index_N.tolist() == [2 * 4 + 2, 2 * 4 + 3, 4 * 4, 4 * 4 + 1]


def test_reads_start_after_the_hidden_frames_and_repeat_the_last_valid_one() -> None:
    layout = PagedLayout.build(
        make_rows([3, 0]), chunk_frames=2, num_frames=6, num_new_B=torch.tensor([1, 2])
    )
    assert layout.read_index_BK[0].tolist() == [23, 8, 9, 10, 10, 10]
    assert layout.read_index_BK[1].tolist() == [4, 5, 6, 7, 12, 13]
    assert layout.valid_BK[0].tolist() == [True] * 4 + [False] * 2
    assert layout.valid_BK[1].all()


def test_a_row_without_any_frame_reads_its_own_first_block() -> None:
    rows = PagedRows(torch.tensor([[3]]), torch.tensor([0]), BLOCK)
    layout = PagedLayout.build(rows, chunk_frames=1, num_frames=2, num_new_B=torch.tensor([0]))
    assert layout.read_index_BK.tolist() == [[12, 12]]
    assert not layout.valid_BK.any()


def test_what_is_written_is_gathered_last() -> None:
    cache = make_cache(make_rows(), host_seqlen=6)
    new = torch.full((2, 2, 1, 2), 99.0)
    cache.write(new, 2 * new)
    assert cache.layout.num_frames == 8
    k_BKHD, v_BKHD = cache.gather(10)
    assert k_BKHD.shape == (2, 10, 1, 2)
    assert (k_BKHD[0, 6:] == 99).all()
    assert (k_BKHD[1, 8:] == 99).all()
    assert (v_BKHD[0, 6:] == 198).all()
    assert k_BKHD[0, :6, 0, 0].tolist() == [40, 42, 44, 46, 16, 18]


def test_head_major_calls_mean_the_same() -> None:
    by_time, by_head = make_cache(make_rows()), make_cache(make_rows())
    k_BTHD, v_BTHD = torch.randn(2, 2, 1, 2), torch.randn(2, 2, 1, 2)
    by_time.write(k_BTHD, v_BTHD)
    by_head.write_kv_chunk(k_BTHD.transpose(1, 2), v_BTHD.transpose(1, 2))
    assert torch.equal(by_time.k_cache, by_head.k_cache)
    expected = by_time.gather(10)[0].transpose(1, 2)
    assert torch.equal(by_head.gather_full_kv(10)[0], expected)


@pytest.mark.parametrize("offset", [3, torch.tensor([3, 5])])
def test_an_offset_says_where_the_chunk_begins(offset: int | Tensor) -> None:
    cache = make_cache(make_rows())
    new = torch.full((2, 1, 2, 2), 99.0)
    cache.write_kv_chunk(new, new, offset=offset)
    frames = cache.k_cache.view(-1, 2)[:, 0]
    second = [3 * 4 + 1, 3 * 4 + 2] if isinstance(offset, Tensor) else [1 * 4 + 3, 3 * 4]
    assert sorted((frames == 99).nonzero().flatten().tolist()) == sorted([23, 8, *second])


def test_layers_share_what_was_built() -> None:
    shared: dict[tuple[int, int], PagedLayout] = {}
    caches = [make_cache(make_rows(), shared=shared) for _ in range(2)]
    for cache in caches:
        cache.write(torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2))
        cache.gather(10)
    assert caches[0].layout is caches[1].layout


def test_a_given_layout_is_not_replaced_by_a_guess() -> None:
    rows = make_rows()
    layout = PagedLayout.build(rows, chunk_frames=2, num_frames=10, num_new_B=torch.tensor([1, 2]))
    cache = make_cache(rows, layout=layout)
    with pytest.raises(StreamStateError, match="chunk_frames=1"):
        cache.write(torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2))
    cache.write(torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2))
    with pytest.raises(StreamStateError, match="reads 10 frames, not 9"):
        cache.gather(9)
    assert cache.gather()[0].shape == (2, 10, 1, 2)
    assert cache.layout is layout


def test_reading_before_writing_needs_the_number_of_frames() -> None:
    cache = make_cache(make_rows())
    with pytest.raises(StreamStateError, match="num_frames"):
        cache.gather()
    assert cache.gather(6)[0].shape == (2, 6, 1, 2)


def test_writing_keeps_no_graph_of_the_model() -> None:
    cache = make_cache(make_rows())
    new = torch.zeros(2, 2, 1, 2, requires_grad=True)
    cache.write(new, new)
    assert not cache.k_cache.requires_grad
