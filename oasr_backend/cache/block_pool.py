"""The K/V memory of all streams and the free list of its blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oasr_backend.cache.kv_tables import IntArray
from oasr_backend.cache.types import CacheConfig
from oasr_backend.device import reserved_zeros
from oasr_backend.errors import ConfigError, PoolExhaustedError, StreamStateError


class BlockPool:
    """Two zeroed tensors (layers, blocks, block_size_frames, n_kv_head, head_dim) and a free list.

    `scratch_blocks` physical blocks past `max_num_blocks` are never handed out: padding lanes
    write there. Handing out and taking back are thread-safe and all-or-nothing, oldest-freed first.
    Blocks that no stream has had yet count as freed long ago, by their ids; with `reuses_first`
    they come last, so that memory on a CPU is what the busiest moment needed.
    A subclass may keep the tensors otherwise: override `_make_storage`, `get_kv_view`,
    `get_kv_block_view` and `zero_blocks`.
    """

    def __init__(
        self, config: CacheConfig, scratch_blocks: int = 0, *, reuses_first: bool = False
    ) -> None:
        if scratch_blocks < 0:
            raise ConfigError(f"scratch_blocks={scratch_blocks} must be at least 0")
        self.config = config
        self.num_blocks = config.pool_blocks
        self.num_total_blocks = self.num_blocks + scratch_blocks
        self._lock = threading.Lock()
        # A ring: the free ids, oldest-freed first, are `_num_listed` places from `_first` on. The
        # ids from `_num_known` on are free too, and were never on the ring.
        self._ring = np.arange(self.num_blocks)
        self._first = 0
        self._num_listed = self._num_known = 0 if reuses_first else self.num_blocks
        self._is_free = np.ones(self.num_blocks, dtype=np.bool_)
        self._make_storage()

    def _make_storage(self) -> None:
        cfg = self.config
        shape = (cfg.num_layers, self.num_total_blocks, cfg.block_size_frames)
        # One allocation for both: a block is blanked by one kernel.
        self._kv_pool = reserved_zeros(
            (2, *shape, cfg.n_kv_head, cfg.head_dim), dtype=cfg.dtype, device=cfg.device
        )
        self._k_pool, self._v_pool = self._kv_pool.unbind(0)

    @property
    def num_free_blocks(self) -> int:
        return self._num_listed + self.num_blocks - self._num_known

    @property
    def scratch_block_ids(self) -> list[int]:
        return list(range(self.num_blocks, self.num_total_blocks))

    def free_block_ids(self) -> list[int]:
        """In the order in which they will be handed out."""
        with self._lock:
            ids: list[int] = self._next_free(self.num_free_blocks).tolist()
        return ids

    def allocate(self, num_blocks: int) -> list[int]:
        """Raises PoolExhaustedError and takes nothing when fewer are free."""
        block_ids: list[int] = self.take(num_blocks).tolist()
        return block_ids

    def take(self, num_blocks: int) -> IntArray:
        """`allocate` for a caller that reckons with arrays."""
        if num_blocks < 0:
            raise StreamStateError(f"cannot allocate {num_blocks} blocks")
        with self._lock:
            if num_blocks > self.num_free_blocks:
                raise PoolExhaustedError(
                    "BlockPool", requested=num_blocks, free=self.num_free_blocks,
                    total=self.num_blocks, remedy="free a stream, or raise max_num_blocks",
                )  # fmt: skip
            block_ids_N = self._next_free(num_blocks)
            num_listed = min(num_blocks, self._num_listed)
            self._first = (self._first + num_listed) % self.num_blocks
            self._num_listed -= num_listed
            self._num_known += num_blocks - num_listed
            self._is_free[block_ids_N] = False
        return block_ids_N

    def free(self, block_ids: Sequence[int] | IntArray) -> None:
        """Raises StreamStateError for a foreign, scratch or already free id; then frees nothing."""
        block_ids_N = np.asarray(block_ids, dtype=np.int64)
        if not block_ids_N.size:
            return
        with self._lock:
            self._check_held(block_ids_N)
            self._before_reuse(block_ids_N)
            places_N = self._places(block_ids_N.size, after=self._num_listed)
            self._ring[places_N] = block_ids_N
            self._num_listed += block_ids_N.size
            self._is_free[block_ids_N] = True

    def _next_free(self, count: int) -> IntArray:
        """The ids that are handed out next; `count` of them are free."""
        listed_N = self._ring[self._places(min(count, self._num_listed))]
        num_new = count - listed_N.size
        return np.concatenate((listed_N, np.arange(self._num_known, self._num_known + num_new)))

    def _places(self, count: int, *, after: int = 0) -> IntArray:
        """Places in the ring of `count` ids, `after` so many."""
        return (self._first + after + np.arange(count)) % self.num_blocks

    def _check_held(self, block_ids_N: IntArray) -> None:
        is_known_N = (block_ids_N >= 0) & (block_ids_N < self.num_blocks)
        if not is_known_N.all():
            raise StreamStateError(
                f"block {block_ids_N[is_known_N.argmin()]} is not one of the pool's "
                f"{self.num_blocks} blocks (scratch blocks are never freed)"
            )
        is_free_N = self._is_free[block_ids_N]
        if is_free_N.any():
            block_id = block_ids_N[is_free_N.argmax()]
            raise StreamStateError(f"double free: block {block_id} is already free")
        if np.unique(block_ids_N).size != block_ids_N.size:
            raise StreamStateError(f"double free: a block is named twice in {block_ids_N.tolist()}")

    def _before_reuse(self, block_ids_N: IntArray) -> None:
        """Called with the blocks that are about to become free; tests fill them with NaN here."""

    def get_kv_view(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, (blocks, block_size_frames, n_kv_head, head_dim), aliased."""
        return self._k_pool[layer], self._v_pool[layer]

    def get_kv_block_view(self, layer: int, block_id: int) -> tuple[Tensor, Tensor]:
        """K and V of one block, (block_size_frames, n_kv_head, head_dim), aliased."""
        return self._k_pool[layer, block_id], self._v_pool[layer, block_id]

    def kv_frames(self) -> Tensor:
        """K and V of all layers, (2, layers, blocks * block_size_frames, n_kv_head * head_dim),
        aliased."""
        return self._kv_pool.flatten(2, 3).flatten(3, 4)

    def gather_kv_blocks(self, layer: int, block_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """K and V (len(block_ids) * block_size_frames, n_kv_head, head_dim), fresh, in order."""
        index = torch.tensor(list(block_ids), dtype=torch.long, device=self.config.device)
        k_pool, v_pool = self.get_kv_view(layer)
        return k_pool.index_select(0, index).flatten(0, 1), v_pool.index_select(0, index).flatten(
            0, 1
        )

    def zero_blocks(self, block_ids: Sequence[int] | Tensor) -> None:
        """Blanks K and V of the blocks in every layer. A tensor of ids (int64) costs no upload."""
        if not isinstance(block_ids, Tensor):
            block_ids = torch.tensor(list(block_ids), dtype=torch.long, device=self.config.device)
        if block_ids.numel():
            self._kv_pool.index_fill_(2, block_ids, 0)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the free list is a set of known blocks."""
        with self._lock:
            free_ids = set(self._next_free(self.num_free_blocks).tolist())
            if len(free_ids) != self.num_free_blocks:
                raise AssertionError("a block is twice on the free list")
            flagged = set(np.flatnonzero(self._is_free).tolist())
            if free_ids != flagged:
                raise AssertionError(f"free list and flags differ in {free_ids ^ flagged}")
