"""The dense protocol of the attention cache: packed K/V tensors in and out, for one stream.

Only the design document's face uses it; a served step writes and reads pages in place. K and V are
packed along the last dimension: (layers, n_kv_head, frames, 2 * head_dim).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oasr_backend.cache.kv_store import KvStore
from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.cache.types import CacheConfig
from oasr_backend.errors import StreamStateError


def check_dense_chunk(new_kv: Tensor, config: CacheConfig) -> None:
    """Raises StreamStateError with both shapes, or with the limit of the frames."""
    expected = (config.num_layers, config.n_kv_head, "T", config.kv_last_dim)
    actual = tuple(new_kv.shape)
    if new_kv.dim() != 4 or (*actual[:2], "T", actual[3]) != expected:
        raise StreamStateError(f"commit: expected new_kv of shape {expected}, got {actual}")
    if not 0 < actual[2] <= config.chunk_size:
        raise StreamStateError(
            f"commit: {actual[2]} frames, expected 1 to chunk_size={config.chunk_size} "
            f"(block_size_frames={config.block_size_frames}): commit chunk by chunk"
        )


def write_dense_chunk(new_kv: Tensor, caches: list[PagedKVCache]) -> None:
    """Splits the packed chunk and writes it into a prepared stream's caches, one a layer."""
    k_LTHD, v_LTHD = new_kv.transpose(1, 2).chunk(2, dim=-1)
    for cache, k_THD, v_THD in zip(caches, k_LTHD, v_LTHD, strict=True):
        cache.write(k_THD.unsqueeze(0), v_THD.unsqueeze(0))


def read_dense_layer(store: KvStore, slot: int, layer: int) -> Tensor:
    """Fresh (1, n_kv_head, visible frames, 2 * head_dim) of one layer."""
    tables = store.tables
    k_FHD, v_FHD = store.pool.gather_kv_blocks(layer, store.blocks_of(slot))
    frames = slice(tables.host_starts[slot], tables.host_seqlens[slot])
    packed_FHD = torch.cat((k_FHD, v_FHD), dim=-1)[frames]
    return packed_FHD.transpose(0, 1).unsqueeze(0)


def read_dense_stack(store: KvStore, slot: int) -> Tensor:
    """All layers of `read_dense_layer`; (0, 0, 0, 0) without history."""
    config, tables = store.config, store.tables
    if tables.host_starts[slot] == tables.host_seqlens[slot]:
        return torch.zeros((0, 0, 0, 0), dtype=config.dtype, device=config.device)
    return torch.cat([read_dense_layer(store, slot, layer) for layer in range(config.num_layers)])
