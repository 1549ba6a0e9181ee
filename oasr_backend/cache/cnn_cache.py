"""Left context of the causal depthwise convolutions."""

from __future__ import annotations

from torch import Tensor

from oasr_backend.cache.slot_pool import StreamSlotPool
from oasr_backend.cache.state import SlotStateCache
from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.cache.types import CacheConfig
from oasr_backend.errors import StreamStateError
from oasr_backend.types import StreamId


class CnnCacheManager(SlotStateCache):
    """`SlotStateCache` of one state, "conv": (layers, slots, kernel_size - 1, hidden_dim)."""

    def __init__(
        self, config: CacheConfig, extra_slots: int = 0, *, slot_pool: StreamSlotPool | None = None
    ) -> None:
        shape = (config.num_layers, config.cnn_cache_frames, config.hidden_dim)
        super().__init__(
            [StreamStateSpec("conv", shape, slot_axis=1)],
            config.max_batch_size,
            config.device,
            dtype=config.dtype,
            extra_slots=extra_slots,
            slot_pool=slot_pool,
        )

    def _what(self) -> str:
        return "convolution cache"

    @property
    def buffer(self) -> Tensor:
        return self.buffer_of("conv")

    def get_cache(self, stream_id: StreamId) -> Tensor:
        """View (layers, 1, kernel_size - 1, hidden_dim); it follows later updates."""
        return self.get_state("conv", stream_id)

    def update(self, stream_id: StreamId, new_cnn_cache: Tensor) -> None:
        """Overwrites in place. Raises StreamStateError with both shapes."""
        self.check_update(stream_id, new_cnn_cache)
        self.get_cache(stream_id).copy_(new_cnn_cache.detach())

    def check_update(self, stream_id: StreamId, new_cnn_cache: Tensor) -> None:
        expected, actual = tuple(self.get_cache(stream_id).shape), tuple(new_cnn_cache.shape)
        if actual != expected:
            raise StreamStateError(
                f"convolution cache of stream {stream_id!r}: expected {expected}, got {actual}"
            )
