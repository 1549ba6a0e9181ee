"""K/V of autoregressive decoders: grows one token a step, never evicts, on a pool of its own.

A row reserves its declared ceiling when it is created, because a pool that runs dry in the middle
of a generation fails a request that is half answered; pages are taken as the row reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from torch import Tensor

from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.types import CacheConfig
from oasr_backend.device import to_device
from oasr_backend.errors import PoolExhaustedError, StreamStateError, UnknownStreamError
from oasr_backend.types import StreamId


@dataclass
class _Row:
    ceiling_tokens: int
    num_tokens: int
    pages: list[int] = field(default_factory=list)


class DecoderKVCacheManager:
    """Pages of every row; a page is a block of the pool, `block_size_frames` tokens.

    A row created with `max_new_tokens=0` is a fixed extent, such as an encoder window's cross
    K/V. Not thread-safe.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.page_tokens = pool.config.block_size_frames
        self._rows: dict[StreamId, _Row] = {}
        self._next_row_id = count()

    def new_row_ids(self, num_rows: int) -> list[StreamId]:
        """Ids that this manager has not given out before."""
        return [f"row-{next(self._next_row_id)}" for _ in range(num_rows)]

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def reserved_blocks(self) -> int:
        """Pages that the live rows may come to hold."""
        return sum(self._pages_for(row.ceiling_tokens) for row in self._rows.values())

    def can_admit(self, max_new_tokens: int, prefill_len: int = 0, *, num_rows: int = 1) -> bool:
        """Whether rows with this ceiling fit beside the ceilings of all live rows."""
        needed = num_rows * self._pages_for(prefill_len + max_new_tokens)
        return self.reserved_blocks + needed <= self.num_blocks

    def create(self, row_id: StreamId, max_new_tokens: int, prefill_len: int = 0) -> None:
        """Reserves the ceiling and takes zeroed pages for the prompt.

        Raises StreamStateError (duplicate, negative or empty) and PoolExhaustedError.
        """
        if row_id in self._rows:
            raise StreamStateError(f"decoder row {row_id!r} is already created: free it first")
        if max_new_tokens < 0 or prefill_len < 0 or max_new_tokens + prefill_len == 0:
            raise StreamStateError(
                f"decoder row {row_id!r}: prefill_len={prefill_len} and "
                f"max_new_tokens={max_new_tokens} must be >= 0 and not both 0"
            )
        if not self.can_admit(max_new_tokens, prefill_len):
            raise PoolExhaustedError(
                "decoder K/V reservation (wait for a row to end, or lower max_new_tokens)",
                requested=self._pages_for(prefill_len + max_new_tokens),
                free=self.num_blocks - self.reserved_blocks,
                total=self.num_blocks,
            )
        row = _Row(prefill_len + max_new_tokens, prefill_len)
        row.pages = self._take_pages(self._pages_for(prefill_len))
        self._rows[row_id] = row

    def append_step(self, row_ids: Sequence[StreamId]) -> list[int]:
        """Counts one more token a row and returns its position; takes pages at page ends.

        Raises UnknownStreamError and StreamStateError (repeated id, past the ceiling); then
        changes nothing.
        """
        rows = self._distinct_rows(row_ids)
        for row_id, row in zip(row_ids, rows, strict=True):
            if row.num_tokens >= row.ceiling_tokens:
                raise StreamStateError(
                    f"decoder row {row_id!r} is at its ceiling of {row.ceiling_tokens} tokens: "
                    "create it with a larger max_new_tokens"
                )
        full = [row for row in rows if row.num_tokens == len(row.pages) * self.page_tokens]
        for row, page in zip(full, self._take_pages(len(full)), strict=True):
            row.pages.append(page)
        positions = [row.num_tokens for row in rows]
        for row in rows:
            row.num_tokens += 1
        return positions

    def free(self, row_id: StreamId) -> None:
        """Returns all pages of the row. A row that is not there is no fault."""
        row = self._rows.pop(row_id, None)
        if row is not None:
            self.pool.free(row.pages)

    def seqlen(self, row_id: StreamId) -> int:
        return self._row(row_id).num_tokens

    def block_tables(self, row_ids: Sequence[StreamId]) -> Tensor:
        """(N, most pages of a row) int32, 0 past a row's last page."""
        rows = [self._row(row_id) for row_id in row_ids]
        width = max((len(row.pages) for row in rows), default=0)
        table = np.zeros((len(rows), max(1, width)), dtype=np.int32)
        for index, row in enumerate(rows):
            table[index, : len(row.pages)] = row.pages
        return to_device(table, self.pool.config.device)

    def cache_seqlens(self, row_ids: Sequence[StreamId]) -> Tensor:
        """(N,) int32 tokens, the ones that `append_step` has counted included."""
        lengths = np.asarray([self.seqlen(row_id) for row_id in row_ids], dtype=np.int32)
        return to_device(lengths, self.pool.config.device)

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages are held once and reservations hold."""
        self.pool.check_integrity()
        held = [page for row in self._rows.values() for page in row.pages]
        if len(set(held)) != len(held) or set(held) & set(self.pool.free_block_ids()):
            raise AssertionError("a decoder page has two owners")
        if len(held) + self.pool.num_free_blocks != self.num_blocks:
            raise AssertionError("decoder pages are lost")
        if self.reserved_blocks > self.num_blocks:
            raise AssertionError("decoder rows reserve more pages than there are")
        for row_id, row in self._rows.items():
            if len(row.pages) != self._pages_for(row.num_tokens):
                raise AssertionError(f"row {row_id!r} holds the wrong number of pages: {row}")

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def _take_pages(self, num_pages: int) -> list[int]:
        pages = self.pool.allocate(num_pages)
        self.pool.zero_blocks(pages)
        return pages

    def _row(self, row_id: StreamId) -> _Row:
        if row_id not in self._rows:
            raise UnknownStreamError(f"decoder row {row_id!r} is not created, or freed")
        return self._rows[row_id]

    def _distinct_rows(self, row_ids: Sequence[StreamId]) -> list[_Row]:
        rows = [self._row(row_id) for row_id in row_ids]
        if len(set(row_ids)) != len(row_ids):
            raise StreamStateError(f"a decoder row is named twice in {list(row_ids)}")
        return rows


def build_decoder_pool(config: CacheConfig, *, page_tokens: int, num_blocks: int) -> BlockPool:
    """A pool of `num_blocks` pages with the layers, heads, device and dtype of `config`."""
    return BlockPool(
        CacheConfig(
            num_layers=config.num_layers,
            n_kv_head=config.n_kv_head,
            head_dim=config.head_dim,
            chunk_size=1,
            block_size_frames=page_tokens,
            max_num_blocks=num_blocks,
            max_blocks_per_seq=num_blocks,
            max_batch_size=1,
            device=config.device,
            dtype=config.dtype,
        )
    )
