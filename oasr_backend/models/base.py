"""What a streaming encoder declares and what a step hands to it.

Three families fit the same contract:
* growing attention history in paged blocks plus convolution state (Conformer);
* a trained fixed window: the same, with `attention_window_frames` set, so that the cache hands
  every stream its whole window, zeroed, at admission (FastConformer, Nemotron);
* fixed-extent state only: `num_kv_layers` 0 and everything in `state_specs` (Zipformer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.cache.state import SlotTensor, StagedSlotTensor, StreamStateSpec


@dataclass(frozen=True)
class EncoderSpec:
    """The geometry of an encoder: what it reads a step and what it keeps between steps."""

    num_mel_bins: int
    subsampling_rate: int
    right_context_frames: int
    model_dim: int
    num_kv_layers: int
    num_kv_heads: int
    head_dim: int
    conv_kernel_size: int
    attention_window_frames: int | None = None
    state_specs: tuple[StreamStateSpec, ...] = ()

    @property
    def min_window_frames(self) -> int:
        """The fewest feature frames that give one encoder frame."""
        return self.right_context_frames + 1

    def window_frames(self, chunk_size: int) -> int:
        """Feature frames that `chunk_size` encoder frames need."""
        return (chunk_size - 1) * self.subsampling_rate + self.min_window_frames

    def stride_frames(self, chunk_size: int) -> int:
        """Feature frames between the starts of two windows."""
        return chunk_size * self.subsampling_rate


@dataclass(frozen=True)
class EncoderCaches:
    """The cached state of one step's rows, the same row order in every part.

    kv: one view a layer; all share one layout, so index arithmetic is done once a step.
    conv: the convolution slots, (L, B, K-1, D) when gathered.
    first_key_position_B: absolute position of each row's oldest visible key.
    states: the encoder's declared states by name; what is scattered is stored at the step's end.
    """

    kv: Sequence[PagedKVCache]
    conv: SlotTensor
    first_key_position_B: Tensor
    states: Mapping[str, StagedSlotTensor] = field(default_factory=dict)

    def store(self, conv_LBKD: Tensor) -> None:
        """The new convolution context and what was scattered into the declared states."""
        self.conv.scatter(conv_LBKD)
        for state in self.states.values():
            state.store()


class StreamingEncoder(Protocol):
    """One batched chunk step. Rows never see each other. Implementations are `nn.Module`s."""

    @property
    def spec(self) -> EncoderSpec: ...

    def tabulate_positions(self, num_positions: int) -> None:
        """Called once, in float32, before serving: builds what depends on absolute positions."""
        ...

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> tuple[Tensor, Tensor]:
        """(B, W, F) feature windows to (B, T, D) encoder frames and the next convolution state.

        Changes nothing that a second call would not write again: K/V rows go where the layout says,
        and the caller stores the convolution state once the whole step has succeeded.
        """
        ...
