"""The attention caches of all streams, as the model reads and writes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oasr_backend.cache.kv_streams import KvStreams
from oasr_backend.cache.paged_kv import PagedKVCache, PagedLayout, PagedRows
from oasr_backend.device import to_device
from oasr_backend.errors import StreamNotPreparedError, StreamStateError
from oasr_backend.types import StreamId

SlotIds = Sequence[int] | Tensor


class AttentionCacheManager(KvStreams):
    """Paged: prepare, let the model write, commit. Dense: `commit` copies what the model returns.

    Both may serve one stream by turns, and see the same history.
    """

    # Paged access, one stream

    def get_paged_caches(self, stream_id: StreamId) -> list[PagedKVCache]:
        """One cache a layer for this chunk, over persistent rows. Raises StreamNotPreparedError."""
        if not self._states.has_room[self.slot_of(stream_id)]:
            raise StreamNotPreparedError(
                f"stream {stream_id!r} has no room for a chunk: call prepare_chunk before each"
            )
        return self._caches(self._rows_of(stream_id), self.cached_frames([stream_id]))

    def get_paged_state_views(self, stream_id: StreamId) -> tuple[Tensor, Tensor]:
        """Views of the stream's (1, W) block table and (1,) lengths; both follow later commits.

        Where block_size_frames > chunk_size the lengths include hidden frames: pass
        `get_cache_starts_view` to PagedKVCache as `cache_starts` too.
        """
        rows = self._rows_of(stream_id)
        return rows.block_table, rows.cache_seqlens

    def get_cache_starts_view(self, stream_id: StreamId) -> Tensor:
        """View (1,): evicted frames at the head of the stream's first block."""
        slot = self.slot_of(stream_id)
        return self.tables.cache_starts[slot : slot + 1]

    def _rows_of(self, stream_id: StreamId) -> PagedRows:
        slot = self.slot_of(stream_id)
        if not self._states.was_prepared[slot]:
            raise StreamNotPreparedError(
                f"stream {stream_id!r} has no paged cache yet: call prepare_chunk first"
            )
        row, tables = slice(slot, slot + 1), self.tables
        return PagedRows(
            tables.block_table[row],
            tables.cache_seqlens[row],
            self.config.block_size_frames,
            cache_starts=tables.cache_starts[row],
        )

    # Paged access, a batch

    def rows_of_slots(self, slot_ids: SlotIds) -> PagedRows:
        """Fresh rows of the slots, in their order; padding lanes (`pad_slots`) are slots too."""
        index = self._slot_index(slot_ids)
        return PagedRows(
            self.tables.block_table.index_select(0, index),
            self.tables.cache_seqlens.index_select(0, index),
            self.config.block_size_frames,
            cache_starts=self.tables.cache_starts.index_select(0, index),
        )

    def build_layout(
        self,
        slot_ids: SlotIds,
        *,
        chunk_frames: int,
        num_new_B: Tensor | None = None,
        history_frames: int | None = None,
    ) -> PagedLayout:
        """Index arithmetic of one step of these slots, for every layer.

        `history_frames` bounds the rows' visible frames from above (see `cached_frames`); when
        None: the most that the host knows of the slots, or of any stream when they are a tensor.
        """
        return self._layout(
            self.rows_of_slots(slot_ids),
            chunk_frames=chunk_frames,
            num_new_B=num_new_B,
            history_frames=self._history_bound(slot_ids, history_frames),
        )

    def get_batched_paged_caches(
        self,
        slot_ids: SlotIds,
        *,
        chunk_frames: int | None = None,
        num_new_B: Tensor | None = None,
        history_frames: int | None = None,
    ) -> tuple[list[PagedKVCache], Tensor, Tensor]:
        """One cache a layer, with the (B, W) block table and (B,) lengths that they share.

        With `chunk_frames` the layout is built now (arguments as for `build_layout`), else by the
        first write.
        """
        rows = self.rows_of_slots(slot_ids)
        history = self._history_bound(slot_ids, history_frames)
        layout = None
        if chunk_frames is not None:
            layout = self._layout(
                rows, chunk_frames=chunk_frames, num_new_B=num_new_B, history_frames=history
            )
        return self._caches(rows, history, layout), rows.block_table, rows.cache_seqlens

    def _layout(
        self,
        rows: PagedRows,
        *,
        chunk_frames: int,
        num_new_B: Tensor | None,
        history_frames: int,
    ) -> PagedLayout:
        if not 0 < chunk_frames <= self.config.chunk_size:
            raise StreamStateError(
                f"chunk_frames={chunk_frames} is outside 1..chunk_size={self.config.chunk_size}: "
                "a prepared stream has room for one chunk"
            )
        return PagedLayout.build(
            rows,
            chunk_frames=chunk_frames,
            num_frames=history_frames + chunk_frames,
            num_new_B=num_new_B,
        )

    def _caches(
        self, rows: PagedRows, host_seqlen: int, layout: PagedLayout | None = None
    ) -> list[PagedKVCache]:
        shared: dict[tuple[int, int], PagedLayout] = {}
        caches = []
        for layer in range(self.config.num_layers):
            k_cache, v_cache = self.pool.get_kv_view(layer)
            cache = PagedKVCache(
                k_cache, v_cache, rows.block_table, rows.cache_seqlens,
                block_size=rows.block_size, host_seqlen=host_seqlen,
                cache_starts=rows.cache_starts, shared=shared, most_new=self.config.chunk_size,
            )  # fmt: skip
            if layout is not None:
                cache.layout = layout
            caches.append(cache)
        return caches

    def _slot_index(self, slot_ids: SlotIds) -> Tensor:
        if isinstance(slot_ids, Tensor):
            return slot_ids
        return to_device(np.asarray(slot_ids, dtype=np.int64), self.config.device)

    def _history_bound(self, slot_ids: SlotIds, history_frames: int | None) -> int:
        if history_frames is not None:
            return history_frames
        visible = self.tables.host_seqlens - self.tables.host_starts
        if not isinstance(slot_ids, Tensor):
            return int(visible[list(slot_ids)].max(initial=0))
        return self.config.max_cache_frames if self.config.evicts else int(visible.max())

    # Dense access

    def commit(self, stream_id: StreamId, new_kv: Tensor) -> None:
        """Appends one chunk, K and V packed: (layers, n_kv_head, T, 2 * head_dim)."""
        self._check_dense_chunk(new_kv)
        self.prepare_chunk(stream_id)
        k_LTHD, v_LTHD = new_kv.transpose(1, 2).chunk(2, dim=-1)
        for cache, k_THD, v_THD in zip(
            self.get_paged_caches(stream_id), k_LTHD, v_LTHD, strict=True
        ):
            cache.write(k_THD.unsqueeze(0), v_THD.unsqueeze(0))
        self.commit_chunk_paged(stream_id, new_kv.shape[2])

    def get_stacked_cache(self, stream_id: StreamId) -> Tensor:
        """Fresh (layers, n_kv_head, visible frames, 2 * head_dim); (0, 0, 0, 0) without history."""
        if not self.cached_frames([stream_id]):
            return torch.zeros((0, 0, 0, 0), dtype=self.config.dtype, device=self.config.device)
        layers = range(self.config.num_layers)
        return torch.cat([self.get_cache_view(stream_id, layer) for layer in layers])

    def get_cache_view(self, stream_id: StreamId, layer: int) -> Tensor:
        """Fresh (1, n_kv_head, visible frames, 2 * head_dim) of one layer."""
        slot, tables = self.slot_of(stream_id), self.tables
        k_FHD, v_FHD = self.pool.gather_kv_blocks(layer, self.blocks_of(stream_id))
        frames = slice(tables.host_starts[slot], tables.host_seqlens[slot])
        packed_FHD = torch.cat((k_FHD, v_FHD), dim=-1)[frames]
        return packed_FHD.transpose(0, 1).unsqueeze(0)

    def _check_dense_chunk(self, new_kv: Tensor) -> None:
        cfg = self.config
        expected = (cfg.num_layers, cfg.n_kv_head, "T", cfg.kv_last_dim)
        actual = tuple(new_kv.shape)
        if new_kv.dim() != 4 or (*actual[:2], "T", actual[3]) != expected:
            raise StreamStateError(f"commit: expected new_kv of shape {expected}, got {actual}")
        if not 0 < actual[2] <= cfg.chunk_size:
            raise StreamStateError(
                f"commit: {actual[2]} frames, expected 1 to chunk_size={cfg.chunk_size} "
                f"(block_size_frames={cfg.block_size_frames}): commit chunk by chunk"
            )
