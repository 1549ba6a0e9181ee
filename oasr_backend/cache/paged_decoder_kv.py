"""One decode group's rows over the decoder pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from oasr_backend.cache.decoder_kv import DecoderKVCacheManager
from oasr_backend.cache.paged_kv import PagedKVCache, PagedLayout, PagedRows
from oasr_backend.device import to_device
from oasr_backend.errors import PoolExhaustedError, StreamStateError
from oasr_backend.types import StreamId


class PagedDecoderKv:
    """The rows of one decode group, as a decoder's layers write and read them.

    A step: `begin_step`, then each layer's `append`. `cross_tokens` > 0 gives every row a second
    slot of fixed extent for the encoder's K/V, read through the same pages.
    """

    def __init__(
        self,
        manager: DecoderKVCacheManager,
        num_rows: int,
        *,
        max_new_tokens: int,
        prefill_len: int = 0,
        cross_tokens: int = 0,
    ) -> None:
        """Admits all rows or none. Raises PoolExhaustedError, StreamStateError."""
        self._manager = manager
        self._self_ids: list[StreamId] = []
        self._cross_ids: list[StreamId] = []
        self._layout: PagedLayout | None = None
        try:
            self._create(self._self_ids, num_rows, max_new_tokens, prefill_len)
            if cross_tokens:
                self._create(self._cross_ids, num_rows, 0, cross_tokens)
        except (PoolExhaustedError, StreamStateError):
            self.free()
            raise
        self._prefill_len, self._cross_tokens = prefill_len, cross_tokens
        self._read_rows()

    @property
    def num_rows(self) -> int:
        return len(self._self_ids)

    @property
    def seqlens(self) -> list[int]:
        return [self._manager.seqlen(row_id) for row_id in self._self_ids]

    def write_prefill(self, layer: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        """Stores the prompt's K/V, from token 0."""
        self._check_tokens(k_BTHD, self._prefill_len)
        self._write_all(self._cache(layer, self._step_rows), k_BTHD, v_BTHD)

    def write_cross(self, layer: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        """Stores the encoder's K/V, once."""
        self._check_tokens(k_BTHD, self._cross_tokens)
        self._write_all(self._cache(layer, self._cross_rows), k_BTHD, v_BTHD)

    def gather_cross(self, layer: int) -> tuple[Tensor, Tensor]:
        """The encoder's K and V, (rows, cross_tokens, heads, dim)."""
        cache = self._cache(layer, self._cross_rows)
        cache.layout = self._cross_layout
        return cache.gather()

    def begin_step(self) -> list[int]:
        """Makes room for one token a row; returns the tokens' positions."""
        positions = self._manager.append_step(self._self_ids)
        self._step_rows = self._rows(self._self_ids, positions)
        self._layout = PagedLayout.build(
            self._step_rows, chunk_frames=1, num_frames=max(positions, default=0) + 1
        )
        return positions

    def append(self, layer: int, k_BTHD: Tensor, v_BTHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stores the step's token, T = 1.

        Returns K and V (rows, K, heads, dim) and which of them to see, (rows, K).
        """
        if self._layout is None:
            raise StreamStateError("append needs a step: call begin_step first")
        cache = self._cache(layer, self._step_rows)
        cache.layout = self._layout
        cache.write(k_BTHD, v_BTHD)
        return (*cache.gather(), self._layout.valid_BK)

    def select(self, keep: Sequence[int]) -> None:
        """Keeps the rows `keep`, in that order, and frees the others.

        A repeated index would alias two rows onto one page: StreamStateError. Beam search keeps
        dense buffers of its own instead.
        """
        if len(set(keep)) != len(keep):
            raise StreamStateError(
                f"select of {list(keep)} repeats a row: paged rows cannot be copied"
            )
        if any(not 0 <= index < self.num_rows for index in keep):
            raise StreamStateError(f"select of {list(keep)} is outside the {self.num_rows} rows")
        dropped = sorted(set(range(self.num_rows)) - set(keep))
        for row_ids in (self._self_ids, self._cross_ids):
            if row_ids:
                for index in dropped:
                    self._manager.free(row_ids[index])
                row_ids[:] = [row_ids[index] for index in keep]
        # The layout names the dropped rows too.
        self._layout = None
        self._read_rows()

    def free(self) -> None:
        """Returns every page; a second call does nothing."""
        for row_ids in (self._self_ids, self._cross_ids):
            for row_id in row_ids:
                self._manager.free(row_id)
            row_ids.clear()
        self._layout = None

    def _create(
        self, row_ids: list[StreamId], num_rows: int, max_new_tokens: int, prefill_len: int
    ) -> None:
        for row_id in self._manager.new_row_ids(num_rows):
            self._manager.create(row_id, max_new_tokens, prefill_len)
            row_ids.append(row_id)

    def _read_rows(self) -> None:
        self._step_rows = self._rows(self._self_ids, [self._prefill_len] * self.num_rows)
        self._cross_rows = self._rows(self._cross_ids, [self._cross_tokens] * self.num_rows)
        self._cross_layout = PagedLayout.build(
            self._cross_rows, chunk_frames=0, num_frames=self._cross_tokens
        )

    def _rows(self, row_ids: list[StreamId], lengths: Sequence[int]) -> PagedRows:
        device = self._manager.pool.config.device
        return PagedRows(
            self._manager.block_tables(row_ids),
            to_device(np.asarray(lengths[: len(row_ids)], dtype=np.int32), device),
            self._manager.page_tokens,
        )

    def _cache(self, layer: int, rows: PagedRows) -> PagedKVCache:
        k_cache, v_cache = self._manager.pool.get_kv_view(layer)
        return PagedKVCache(
            k_cache, v_cache, rows.block_table, rows.cache_seqlens, block_size=rows.block_size
        )

    def _check_tokens(self, k_BTHD: Tensor, num_tokens: int) -> None:
        if tuple(k_BTHD.shape[:2]) != (self.num_rows, num_tokens):
            raise StreamStateError(
                f"expected K/V of {self.num_rows} rows * {num_tokens} tokens, as the rows were "
                f"created, got {tuple(k_BTHD.shape[:2])}"
            )

    def _write_all(self, cache: PagedKVCache, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        cache.write_kv_chunk(k_BTHD.transpose(1, 2), v_BTHD.transpose(1, 2), offset=0)
