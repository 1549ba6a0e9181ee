"""Every cache of the served model behind one door: open, prepare, views, commit, free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from oasr_backend.cache import (
    AttentionCacheManager,
    BlockPool,
    CacheConfig,
    CnnCacheManager,
    CtcStateCacheManager,
    StreamContext,
    StreamHandle,
    StreamSlotPool,
)
from oasr_backend.cache.device import to_device
from oasr_backend.cache.sizing import sized
from oasr_backend.config import ServingConfig
from oasr_backend.decoders import GpuDecoderConfig
from oasr_backend.encoders import EncoderCaches, EncoderSpec
from oasr_backend.types import Hypothesis


def build_cache_config(
    config: ServingConfig, spec: EncoderSpec, *, device: torch.device, dtype: torch.dtype
) -> CacheConfig:
    """The cache geometry of an encoder under the server's settings.

    A trained attention window overrides `num_left_chunks`. Raises ConfigError with the arithmetic.
    """
    num_left_chunks = config.num_left_chunks
    if spec.attention_window_frames is not None:
        num_left_chunks = -(-spec.attention_window_frames // config.chunk_size)
    geometry = CacheConfig(
        num_layers=spec.num_kv_layers,
        n_kv_head=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_dim=spec.model_dim,
        kernel_size=spec.conv_kernel_size,
        chunk_size=config.chunk_size,
        num_left_chunks=num_left_chunks,
        block_size_frames=config.block_size_frames,
        max_num_blocks=config.max_num_blocks or None,
        max_blocks_per_seq=config.max_blocks_per_seq,
        max_batch_size=config.max_streams,
        device=device,
        dtype=dtype,
        prefill_kv_window=spec.attention_window_frames is not None,
        stream_states=spec.state_specs,
        position_limit_frames=config.position_limit_frames,
    )
    if config.max_num_blocks:
        return geometry
    on_cpu = device.type == "cpu"
    return sized(geometry, budget_bytes=config.cpu_kv_budget_mib << 20 if on_cpu else None)


class StreamCaches:
    """The managers of one engine, one row number per stream shared by all of them.

    Streams are named by generation. State changes at open, prepare, commit and free only.
    """

    def __init__(self, config: CacheConfig, decoder: GpuDecoderConfig, *, vocab_size: int) -> None:
        self.config = config
        self.pool = BlockPool(config)
        self.slots = StreamSlotPool(config.max_batch_size)
        self.attention = AttentionCacheManager(self.pool, config, slot_pool=self.slots)
        self.conv = CnnCacheManager(config, slot_pool=self.slots)
        self.ctc = CtcStateCacheManager(decoder, device=config.device)
        self._vocab_size = vocab_size

    def open(self, generation: int) -> StreamContext[StreamHandle]:
        """Allocates every per-stream state, or none of it."""
        with ExitStack() as undo:
            self.attention.allocate_stream(generation)
            undo.callback(self.attention.free_stream, generation)
            self.conv.allocate_stream(generation)
            undo.callback(self.conv.free_stream, generation)
            self.ctc.allocate_stream(generation, batch=1, vocab_size=self._vocab_size)
            undo.pop_all()
        return StreamContext(generation, self.attention, self.conv, self.ctc)

    def prepare(self, generations: Sequence[int]) -> None:
        """Makes room for one more chunk of every stream; nothing is written yet."""
        self.attention.prepare_chunks_batched(generations)

    def encoder_caches(
        self, generations: Sequence[int], num_frames: Sequence[int]
    ) -> EncoderCaches:
        """What the encoder reads and writes in this step; valid until the commit.

        Slots, real frames and positions of all rows travel to the device in one copy.
        """
        attention = self.attention
        history = [attention.cached_frames([generation]) for generation in generations]
        slots = [attention.slot_of(generation) for generation in generations]
        first_positions = np.subtract(attention.position_offsets(generations), history)
        host_3B = np.array([slots, num_frames, first_positions], dtype=np.int64)
        slots_B, num_new_B, first_key_position_B = to_device(host_3B, self.config.device).unbind()
        kv, _, _ = attention.get_batched_paged_caches(
            slots_B,
            chunk_frames=self.config.chunk_size,
            num_new_B=num_new_B,
            history_frames=max(history),
        )
        conv = self.conv.view_of("conv", slots_B)
        return EncoderCaches(kv=kv, conv=conv, first_key_position_B=first_key_position_B)

    def commit(
        self, generations: Sequence[int], num_frames: Sequence[int], log_probs_BTV: Tensor
    ) -> None:
        """Makes the step count: lengths advance, old history goes, hypotheses grow."""
        self.attention.commit_chunks_paged_batched(generations, num_frames)
        states = self.ctc.get_states(generations)
        self.ctc.decoder.decode_chunk_batch(log_probs_BTV, states, num_frames=num_frames)

    def hypotheses(self, generations: Sequence[int]) -> list[Hypothesis]:
        """The best hypothesis of each stream so far, without device work."""
        return self.ctc.decoder.best_batch(self.ctc.get_states(generations))

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.attention.check_integrity()
        self.ctc.check_integrity()
