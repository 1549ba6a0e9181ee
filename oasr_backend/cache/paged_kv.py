"""What an attention layer sees of the pool: write the chunk, gather the visible frames.

Shape letters: B rows, T new frames, K keys (history and new), H K/V heads, D head dimension,
W blocks a table row can name, P physical blocks, N = B * T.

Table coordinates of a row count from the first frame of its first block; the first
`cache_starts` of them are evicted frames that still share the block and are never read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from oasr_backend.errors import StreamStateError


@dataclass(frozen=True)
class PagedRows:
    """The rows of one step. `cache_seqlens` counts hidden frames too; no `cache_starts` is 0."""

    block_table: Tensor
    cache_seqlens: Tensor
    block_size: int
    cache_starts: Tensor | None = None

    def frame_index(self, frame_BX: Tensor) -> Tensor:
        """Flat index into the pool seen as (P * block_size) frames, of table coordinates."""
        block_BX = self.block_table.gather(1, frame_BX.div(self.block_size, rounding_mode="floor"))
        return block_BX.long() * self.block_size + frame_BX.remainder(self.block_size)


@dataclass(frozen=True)
class PagedLayout:
    """Index arithmetic of one step, computed once and shared by all layers.

    `read_index_BK` repeats a row's last valid frame past its end, so a padded column reads the
    stream's own values: a masked weight still multiplies them, and NaN * 0 is NaN.
    """

    write_index_N: Tensor
    read_index_BK: Tensor
    history_B: Tensor
    visible_B: Tensor

    @property
    def num_frames(self) -> int:
        return self.read_index_BK.shape[1]

    @cached_property
    def valid_BK(self) -> Tensor:  # noqa: N802 - named for its shape
        """Which columns are a row's history or its real new frames."""
        key_K = torch.arange(self.num_frames, device=self.visible_B.device)
        return key_K < self.visible_B.unsqueeze(1)

    @classmethod
    def build(
        cls,
        rows: PagedRows,
        *,
        chunk_frames: int,
        num_frames: int,
        num_new_B: Tensor | None = None,
    ) -> PagedLayout:
        """`num_frames` is K; `num_new_B` tells each row's real new frames, all of them when None.

        Operates on tensors only, so it may run inside a captured CUDA graph.
        """
        device = rows.block_table.device
        ends_B = rows.cache_seqlens.long()
        starts_B = torch.zeros_like(ends_B) if rows.cache_starts is None else rows.cache_starts
        history_B = ends_B - starts_B
        visible_B = history_B + (chunk_frames if num_new_B is None else num_new_B)
        new_T = torch.arange(chunk_frames, device=device)
        key_K = torch.arange(num_frames, device=device)
        last_B1 = (visible_B - 1).clamp_min(0).unsqueeze(1)
        read_BK = starts_B.unsqueeze(1) + torch.minimum(key_K.unsqueeze(0), last_B1)
        return cls(
            write_index_N=rows.frame_index(ends_B.unsqueeze(1) + new_T).flatten(),
            read_index_BK=rows.frame_index(read_BK),
            history_B=history_B,
            visible_B=visible_B,
        )


_NOT_BUILT = PagedLayout(
    write_index_N=torch.empty(0, dtype=torch.long),
    read_index_BK=torch.empty((0, 0), dtype=torch.long),
    history_B=torch.empty(0, dtype=torch.long),
    visible_B=torch.empty(0, dtype=torch.long),
)


@dataclass
class PagedKVCache:
    """One layer's K/V of the rows of a step; `k_cache`, `v_cache` alias the pool (P, block, H, D).

    `host_seqlen` is the most visible frames of history among the rows, as far as the host knows.
    Without a `layout` the first `write` builds one for K = host_seqlen + T, and `gather` another
    when it is asked for another K; `shared` lets the layers of a step share what was built. Serves
    one step: after a commit take new ones.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cache_seqlens: Tensor
    block_size: int
    host_seqlen: int = 0
    cache_starts: Tensor | None = None
    layout: PagedLayout = _NOT_BUILT
    shared: dict[tuple[int, int], PagedLayout] = field(default_factory=dict, repr=False)
    # Room behind the history, where the maker knows of it; None: the caller answers for it.
    most_new: int | None = None
    _num_new: int = field(default=0, init=False, repr=False)
    _builds: bool = field(default=False, init=False, repr=False)

    @property
    def rows(self) -> PagedRows:
        return PagedRows(
            self.block_table, self.cache_seqlens, self.block_size, cache_starts=self.cache_starts
        )

    def write(self, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        """Stores the new frames behind each row's history; `cache_seqlens` stays as it is."""
        num_new = k_BTHD.shape[1]
        if self.most_new is not None and num_new > self.most_new:
            raise StreamStateError(
                f"write of {num_new} frames: a prepared stream has room for {self.most_new}, one "
                "chunk; write and commit them one after the other"
            )
        if self.layout is _NOT_BUILT or (self._builds and num_new != self._num_new):
            self._build(num_new, self.host_seqlen + num_new)
        if self.layout.write_index_N.numel() != k_BTHD.shape[0] * num_new:
            raise StreamStateError(
                f"the layout was built for {self.layout.write_index_N.numel()} new frames in all, "
                f"got {tuple(k_BTHD.shape)}: build it with chunk_frames={num_new}"
            )
        self._num_new = num_new
        self._store(self.layout.write_index_N, k_BTHD, v_BTHD)

    def gather(self, num_frames: int | None = None) -> tuple[Tensor, Tensor]:
        """K and V (B, K, H, D) of history and new frames, oldest first, fresh and finite.

        Columns outside `layout.valid_BK` repeat the row's last frame.
        """
        if num_frames is not None and num_frames != self.layout.num_frames:
            self._build(self._num_new, num_frames)
        if self.layout is _NOT_BUILT:
            raise StreamStateError("gather before write needs num_frames")
        index = self.layout.read_index_BK
        return self._load(self.k_cache, index), self._load(self.v_cache, index)

    def write_kv_chunk(
        self, new_k_BHTD: Tensor, new_v_BHTD: Tensor, *, offset: int | Tensor | None = None
    ) -> None:
        """`write` for head-major tensors; `offset` overrides `cache_seqlens` as the first frame."""
        k_BTHD, v_BTHD = new_k_BHTD.transpose(1, 2), new_v_BHTD.transpose(1, 2)
        if offset is None:
            self.write(k_BTHD, v_BTHD)
            return
        first_B = torch.as_tensor(offset, device=self.block_table.device).long()
        frame_T = torch.arange(k_BTHD.shape[1], device=self.block_table.device)
        frame_BT = first_B.expand(self.block_table.shape[0]).unsqueeze(1) + frame_T
        self._store(self.rows.frame_index(frame_BT).flatten(), k_BTHD, v_BTHD)

    def gather_full_kv(self, max_total: int) -> tuple[Tensor, Tensor]:
        """`gather` as (B, H, max_total, D)."""
        k_BKHD, v_BKHD = self.gather(max_total)
        return k_BKHD.transpose(1, 2), v_BKHD.transpose(1, 2)

    def _build(self, num_new: int, num_frames: int) -> None:
        if self.layout is not _NOT_BUILT and not self._builds:
            raise StreamStateError(
                f"the given layout reads {self.layout.num_frames} frames, not {num_frames}: build "
                "it with the history_frames that the model reads"
            )
        key = (num_new, num_frames)
        if key not in self.shared:
            self.shared[key] = PagedLayout.build(
                self.rows, chunk_frames=num_new, num_frames=num_frames
            )
        self.layout = self.shared[key]
        self._builds = True

    def _store(self, index_N: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        for pool, new in ((self.k_cache, k_BTHD), (self.v_cache, v_BTHD)):
            frames = pool.view(-1, pool.shape[2] * pool.shape[3])
            frames.index_copy_(0, index_N, new.detach().to(pool.dtype).reshape(-1, frames.shape[1]))

    def _load(self, pool: Tensor, index_BK: Tensor) -> Tensor:
        frames = pool.view(-1, pool.shape[2] * pool.shape[3])
        picked = frames.index_select(0, index_BK.flatten())
        return picked.view(*index_BK.shape, pool.shape[2], pool.shape[3])
