"""One step's rows as what every attention layer writes to and reads from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from torch import Tensor

from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.kv_rows import BoolArray
from oasr_backend.cache.kv_tables import IntArray
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


@dataclass(frozen=True)
class StepIndex:
    """Where a step's frames lie in a layer's pool of (blocks * block size) frames; on the host.

    Histories end at one column, H frames from the first: column j of a row is the frame j - H after
    its first new one. A column before a row's history names the oldest frame of its own, or the
    place of its first new one, so that what is read is finite and no other stream's.
    """

    read_BH: IntArray
    write_BT: IntArray
    valid_BK: BoolArray
    history_B: IntArray

    @classmethod
    def build(
        cls, rows: PagedRows, *, history_frames: int, chunk_frames: int, num_new_B: Tensor | None
    ) -> StepIndex:
        """`history_frames` is H; K is H + chunk_frames. The rows must lie on the host."""
        ends_B1 = rows.cache_seqlens.numpy().astype(np.int64)[:, None]
        starts_B1 = 0 if rows.cache_starts is None else rows.cache_starts.numpy()[:, None]
        column_K = np.arange(-history_frames, chunk_frames)
        frame_BK = np.maximum(ends_B1 + column_K, starts_B1)
        block_BK, offset_BK = np.divmod(frame_BK, rows.block_size)
        table_BW = rows.block_table.numpy()
        frame_BK = np.take_along_axis(table_BW, block_BK, axis=1) * rows.block_size + offset_BK
        history_B1 = ends_B1 - starts_B1
        num_new_B1 = chunk_frames if num_new_B is None else num_new_B.numpy()[:, None]
        return cls(
            read_BH=np.ascontiguousarray(frame_BK[:, :history_frames]),
            write_BT=frame_BK[:, history_frames:],
            valid_BK=(column_K >= -history_B1) & (column_K < num_new_B1),
            history_B=history_B1[:, 0],
        )


class StepCaches(Sequence[PagedKVCache]):
    """One cache a layer for the rows of a step, made when the first of them is asked for.

    `history_frames` bounds every row's visible past from above. To read and write all layers at
    once, take `step_index` and the pool instead.
    """

    def __init__(
        self, pool: BlockPool, rows: PagedRows, *, num_new_B: Tensor | None, history_frames: int
    ) -> None:
        self.pool, self.rows = pool, rows
        self.num_new_B, self.history_frames = num_new_B, history_frames

    @cached_property
    def _caches(self) -> list[PagedKVCache]:
        layout = step_layout(
            self.rows,
            self.pool.config,
            num_new_B=self.num_new_B,
            history_frames=self.history_frames,
        )
        return layer_caches(self.pool, self.rows, self.history_frames, layout)

    def step_index(self) -> StepIndex:
        """With one column of history at least: no graph need know tensors without elements."""
        return StepIndex.build(
            self.rows,
            history_frames=max(1, self.history_frames),
            chunk_frames=self.pool.config.chunk_size,
            num_new_B=self.num_new_B,
        )

    def __len__(self) -> int:
        return self.pool.config.num_layers

    @overload
    def __getitem__(self, layer: int) -> PagedKVCache: ...
    @overload
    def __getitem__(self, layer: slice) -> list[PagedKVCache]: ...
    def __getitem__(self, layer: int | slice) -> PagedKVCache | list[PagedKVCache]:
        return self._caches[layer]

    def __iter__(self) -> Iterator[PagedKVCache]:
        return iter(self._caches)
