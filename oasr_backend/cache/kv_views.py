"""One step's rows as what every attention layer writes to and reads from."""

from __future__ import annotations

from torch import Tensor

from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.paged_kv import PagedKVCache, PagedLayout, PagedRows
from oasr_backend.cache.types import CacheConfig
from oasr_backend.errors import StreamStateError


def step_layout(
    rows: PagedRows,
    config: CacheConfig,
    *,
    num_new_B: Tensor | None,
    history_frames: int,
    chunk_frames: int | None = None,
) -> PagedLayout:
    """Index arithmetic of one step, for every layer.

    `history_frames` bounds the rows' visible past from above; `chunk_frames` None is a whole chunk.
    """
    new_frames = config.chunk_size if chunk_frames is None else chunk_frames
    if not 0 < new_frames <= config.chunk_size:
        raise StreamStateError(
            f"chunk_frames={new_frames} is outside 1..chunk_size={config.chunk_size}: "
            "a prepared stream has room for one chunk"
        )
    num_frames = history_frames + new_frames
    return PagedLayout.build(
        rows, chunk_frames=new_frames, num_frames=num_frames, num_new_B=num_new_B
    )


def layer_caches(
    pool: BlockPool, rows: PagedRows, history_frames: int, layout: PagedLayout | None = None
) -> list[PagedKVCache]:
    """One cache a layer over these rows; without a layout the first write builds one for all."""
    shared: dict[tuple[int, int], PagedLayout] = {}
    caches = []
    for layer in range(pool.config.num_layers):
        k_cache, v_cache = pool.get_kv_view(layer)
        cache = PagedKVCache(
            k_cache, v_cache, rows.block_table, rows.cache_seqlens,
            block_size=rows.block_size, host_seqlen=history_frames,
            cache_starts=rows.cache_starts, shared=shared, most_new=pool.config.chunk_size,
        )  # fmt: skip
        if layout is not None:
            cache.layout = layout
        caches.append(cache)
    return caches
