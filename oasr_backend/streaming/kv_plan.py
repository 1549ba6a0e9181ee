"""How large the K/V pool is: the encoder's attention under the server's settings."""

from __future__ import annotations

from dataclasses import replace

import torch

from oasr_backend.cache import CacheConfig
from oasr_backend.cache.sizing import (
    affordable_blocks,
    available_bytes,
    block_bytes,
    block_range,
    sized,
)
from oasr_backend.config import ServingConfig
from oasr_backend.errors import ConfigError
from oasr_backend.models.base import AttentionSpec, EncoderSpec, TrainedWindow


def plan_kv(
    config: ServingConfig, spec: EncoderSpec, *, device: torch.device, dtype: torch.dtype
) -> CacheConfig | None:
    """The cache geometry of an encoder's attention; None for an encoder without.

    A trained window overrides `num_left_chunks`. Raises ConfigError with the arithmetic, in terms
    of the settings.
    """
    if spec.attention is None:
        _check_no_blocks(config)
        return None
    geometry = _geometry(config, spec.attention, spec.chunk_frames, device=device, dtype=dtype)
    if geometry.peak_blocks is not None:
        # No row is ever longer than the peak.
        geometry = replace(geometry, max_blocks_per_seq=geometry.peak_blocks)
    if config.cache.max_num_blocks:
        _check_stated_pool(config, geometry)
        return replace(geometry, max_num_blocks=config.cache.max_num_blocks)
    budget_bytes = config.cache.cpu_kv_budget_mib << 20 if device.type == "cpu" else None
    _check_memory(config, geometry, budget_bytes)
    return sized(geometry, budget_bytes=budget_bytes)


def _check_no_blocks(config: ServingConfig) -> None:
    """Raises ConfigError for settings of a pool that the encoder does not have."""
    for name in ("block_size_frames", "max_num_blocks"):
        value = getattr(config.cache, name)
        if value:
            raise ConfigError(
                f"{name}={value} sizes a pool of K/V blocks, and this encoder keeps none; leave it "
                "out"
            )


def _geometry(
    config: ServingConfig,
    attention: AttentionSpec,
    chunk_frames: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> CacheConfig:
    settings, span = config.cache, attention.span
    window_frames = span.frames if isinstance(span, TrainedWindow) else None
    return CacheConfig(
        num_layers=attention.num_layers,
        n_kv_head=attention.num_kv_heads,
        head_dim=attention.head_dim,
        chunk_size=chunk_frames,
        num_left_chunks=settings.num_left_chunks if window_frames is None else -1,
        window_frames=window_frames,
        prefill_kv_window=window_frames is not None,
        block_size_frames=settings.block_size_frames or chunk_frames,
        max_num_blocks=None,
        max_blocks_per_seq=settings.max_blocks_per_seq,
        max_batch_size=config.step.max_streams,
        device=device,
        dtype=dtype,
        position_limit_frames=settings.position_limit_frames,
    )


def _check_stated_pool(config: ServingConfig, geometry: CacheConfig) -> None:
    per_stream = geometry.peak_blocks or 1
    max_num_blocks, max_streams = config.cache.max_num_blocks, config.step.max_streams
    needed = max_streams * per_stream
    if max_num_blocks < needed:
        raise ConfigError(
            f"max_num_blocks={max_num_blocks} is less than the {needed} blocks that "
            f"max_streams={max_streams} streams need, {per_stream} each; raise "
            f"max_num_blocks, set it to 0 for what is needed, or {_less_need(geometry)}"
        )


def _check_memory(config: ServingConfig, geometry: CacheConfig, budget_bytes: int | None) -> None:
    needed, _ = block_range(geometry)
    available, words = available_bytes(geometry.device, budget_bytes)
    if affordable_blocks(geometry, available) >= needed:
        return
    need_mib = -(-needed * block_bytes(geometry) >> 20)
    if budget_bytes is None:
        limit = f"{geometry.device} has {max(0, available) >> 20} MiB for it ({words}, in bytes)"
        more = "free memory of that GPU"
    else:
        limit = f"cpu_kv_budget_mib={config.cache.cpu_kv_budget_mib}"
        more = f"set cpu_kv_budget_mib={need_mib}"
    raise ConfigError(
        f"the K/V pool of max_streams={config.step.max_streams} streams needs {need_mib} MiB "
        f"({needed} blocks of {block_bytes(geometry)} bytes), but {limit}; {more}, or "
        f"{_less_need(geometry)}"
    )


def _less_need(geometry: CacheConfig) -> str:
    if geometry.prefill_kv_window or geometry.num_left_chunks == 0:
        return "lower max_streams"
    less = "num_left_chunks" if geometry.evicts else "bound the history with num_left_chunks"
    return f"lower max_streams or {less}"
