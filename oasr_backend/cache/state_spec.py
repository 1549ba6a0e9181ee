"""Declaration of one fixed-extent state tensor that every stream owns a slot of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oasr_backend.errors import ConfigError


@dataclass(frozen=True)
class StreamStateSpec:
    """`shape` is one stream's, without the slot axis, which goes in at `slot_axis`.

    `persistent` marks what describes the request and not the audio: a turn's reset keeps it.
    `dtype` None takes the cache's.
    """

    name: str
    shape: tuple[int, ...]
    slot_axis: int = 0
    dtype: torch.dtype | None = None
    persistent: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.slot_axis <= len(self.shape):
            raise ConfigError(
                f"state {self.name!r}: slot_axis={self.slot_axis} is outside 0..{len(self.shape)} "
                f"for shape {self.shape}"
            )
        if any(size < 0 for size in self.shape):
            raise ConfigError(f"state {self.name!r}: negative size in shape {self.shape}")

    def buffer_shape(self, num_slots: int) -> tuple[int, ...]:
        return (*self.shape[: self.slot_axis], num_slots, *self.shape[self.slot_axis :])
