"""How many K/V blocks fit the memory."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch

from oasr_backend.cache.types import CacheConfig
from oasr_backend.errors import ConfigError

logger = logging.getLogger(__name__)

#: With unlimited history a pool below this many blocks a stream is not worth starting.
MIN_BLOCKS_PER_STREAM = 8
DEFAULT_UTILISATION = 0.9
DEFAULT_RESERVE_BYTES = 256 << 20


def bytes_per_kv_block(
    *, num_layers: int, block_size_frames: int, n_kv_head: int, head_dim: int, dtype: torch.dtype
) -> int:
    """K and V of one block in every layer."""
    return 2 * num_layers * block_size_frames * n_kv_head * head_dim * dtype.itemsize


def block_bytes(config: CacheConfig) -> int:
    return bytes_per_kv_block(
        num_layers=config.num_layers,
        block_size_frames=config.block_size_frames,
        n_kv_head=config.n_kv_head,
        head_dim=config.head_dim,
        dtype=config.dtype,
    )


def derive_max_num_blocks(
    config: CacheConfig,
    *,
    budget_bytes: int | None = None,
    utilisation: float = DEFAULT_UTILISATION,
    reserve_bytes: int = DEFAULT_RESERVE_BYTES,
) -> int:
    """Blocks for `max_num_blocks`, from a stated budget or the device's free memory.

    Bounded history: exactly max_batch_size peaks, and a check that they fit. Unlimited: what
    fits, up to what the block table addresses. Of a device, `utilisation` of the whole memory less
    what is in use less `reserve_bytes` (activations) may be taken. Raises ConfigError with the sum.
    """
    floor, ceiling = block_range(config)
    available, origin = available_bytes(config.device, budget_bytes, utilisation, reserve_bytes)
    affordable = affordable_blocks(config, available)
    if affordable < floor:
        less = "max_batch_size"
        if config.window_frames is None:
            less = "max_batch_size or num_left_chunks"
        raise ConfigError(
            f"the K/V pool needs at least {floor} blocks of {block_bytes(config)} bytes = "
            f"{floor * block_bytes(config)} bytes for max_batch_size={config.max_batch_size}, but "
            f"{origin} = {available} bytes hold {affordable}; lower {less}, or "
            "grant more memory"
        )
    num_blocks = min(affordable, ceiling)
    limit = "memory" if affordable < ceiling else "the streams' ceiling"
    logger.info("K/V pool: %s blocks, limited by %s (%s bytes)", num_blocks, limit, available)
    return num_blocks


def sized(config: CacheConfig, *, budget_bytes: int | None = None) -> CacheConfig:
    """The same config with `max_num_blocks` derived, if it is None."""
    if config.max_num_blocks is not None:
        return config
    return replace(config, max_num_blocks=derive_max_num_blocks(config, budget_bytes=budget_bytes))


def affordable_blocks(config: CacheConfig, available: int) -> int:
    """Blocks that so many bytes hold."""
    return max(0, available) // max(1, block_bytes(config))


def block_range(config: CacheConfig) -> tuple[int, int]:
    """The fewest blocks that all streams need together, and the most that they can use."""
    if config.peak_blocks is not None:
        exact = config.max_batch_size * config.peak_blocks
        return exact, exact
    least = min(MIN_BLOCKS_PER_STREAM, config.max_blocks_per_seq)
    return config.max_batch_size * least, config.max_batch_size * config.max_blocks_per_seq


def available_bytes(
    device: torch.device | str,
    budget_bytes: int | None,
    utilisation: float = DEFAULT_UTILISATION,
    reserve_bytes: int = DEFAULT_RESERVE_BYTES,
) -> tuple[int, str]:
    """Bytes for a pool on the device, and the sum in words. Raises ConfigError where none can."""
    if budget_bytes is not None:
        return budget_bytes, "the budget"
    if torch.device(device).type != "cuda":
        raise ConfigError(
            f"max_num_blocks cannot be derived from free memory on {device}: set "
            "max_num_blocks or a memory budget"
        )
    if not 0 < utilisation <= 1:
        raise ConfigError(f"utilisation={utilisation} must be in (0, 1]")
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    words = f"{utilisation} * {total} total - {used} in use - {reserve_bytes} reserve"
    return math.floor(total * utilisation) - used - reserve_bytes, words
