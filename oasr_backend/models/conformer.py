"""Conformer encoder (Gulati et al., 2020) in streaming inference form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.kernels import add_layer_norm
from oasr_backend.models.base import AttentionSpec, EncoderCaches, EncoderSpec, StreamingEncoder
from oasr_backend.models.layers import (
    SUBSAMPLING_KINDS,
    CausalConvolution,
    Conv2dSubsampling,
    FeedForward,
    RelPositionAttention,
    sinusoid_table,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "hardtanh": F.hardtanh,
    "selu": F.selu,
}
CONV_STATE = "conv"


@dataclass(frozen=True)
class ConformerConfig:
    """Sizes and options of one checkpoint. `head_dim` * `num_heads` may differ from `model_dim`.

    `chunk_sizes` are those that it was trained with; empty: any.
    """

    num_mel_bins: int
    model_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward_dim: int
    conv_kernel_size: int
    subsampling: str = "conv2d"
    activation: str = "swish"
    macaron: bool = True
    conv_layer_norm: bool = True
    norm_eps: float = 1e-5
    chunk_sizes: tuple[int, ...] = ()

    @property
    def spec(self) -> EncoderSpec:
        """What an encoder of these sizes reads and keeps.

        Its one declared state is "conv", the left context of each layer's convolution.
        """
        kind = SUBSAMPLING_KINDS[self.subsampling]
        conv_shape = (self.num_layers, self.conv_kernel_size - 1, self.model_dim)
        return EncoderSpec(
            model_dim=self.model_dim,
            subsampling_rate=kind.rate,
            right_context_frames=kind.right_context_frames,
            attention=AttentionSpec(self.num_layers, self.num_kv_heads, self.head_dim),
            state_specs=(StreamStateSpec(CONV_STATE, conv_shape, slot_axis=1),),
            chunk_sizes=self.chunk_sizes,
        )


@dataclass(frozen=True)
class LayerContext:
    """What one layer is told beside its input; `next_norm` belongs to the block after it."""

    first_position_B: Tensor
    conv_BKD: Tensor
    next_norm: nn.LayerNorm


class ConformerLayer(nn.Module):
    """[half feed-forward] -> attention -> convolution -> [half] feed-forward -> norm."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        activation, eps = ACTIVATIONS[config.activation], config.norm_eps

        def feed_forward() -> FeedForward:
            return FeedForward(
                config.model_dim, config.feed_forward_dim, activation=activation, norm_eps=eps
            )

        self.macaron = feed_forward() if config.macaron else None
        self.attention = RelPositionAttention(
            config.model_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=eps,
        )
        self.convolution = CausalConvolution(
            config.model_dim,
            config.conv_kernel_size,
            activation=activation,
            norm_eps=eps,
            layer_norm=config.conv_layer_norm,
        )
        self.feed_forward = feed_forward()
        self.norm = nn.LayerNorm(config.model_dim, eps=eps)

    @property
    def first_norm(self) -> nn.LayerNorm:
        """The norm of the first block, which is applied by what precedes the layer."""
        return self.attention.norm if self.macaron is None else self.macaron.norm

    def forward(
        self,
        x_ND: Tensor,
        normed_ND: Tensor,
        kv: PagedKVCache,
        *,
        context: LayerContext,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the residual and its first norm; returns both for what follows, and the next
        convolution state."""
        if self.macaron is not None:
            change_ND = self.macaron(normed_ND)
            x_ND, normed_ND = add_layer_norm(x_ND, change_ND, self.attention.norm)
        change_ND = self.attention(normed_ND, kv, context.first_position_B)
        x_ND, normed_ND = add_layer_norm(x_ND, change_ND, self.convolution.norm)
        change_ND, tail_BKD = self.convolution(
            normed_ND, context.conv_BKD, context.first_position_B.shape[0]
        )
        x_ND, normed_ND = add_layer_norm(x_ND, change_ND, self.feed_forward.norm)
        change_ND = self.feed_forward(normed_ND)
        x_ND, normed_ND = add_layer_norm(x_ND, change_ND, context.next_norm, self.norm)
        return x_ND, normed_ND, tail_BKD


class ConformerEncoder(StreamingEncoder):
    """Subsampling, layers and the last norm; positions scale the input by sqrt(model_dim)."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.config = config
        kind = SUBSAMPLING_KINDS[config.subsampling]
        self.subsampling = Conv2dSubsampling(kind, config.num_mel_bins, config.model_dim)
        self.layers = nn.ModuleList(ConformerLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.model_dim, eps=config.norm_eps)

    @property
    def spec(self) -> EncoderSpec:
        return self.config.spec

    def tabulate_positions(self, num_positions: int) -> None:
        """Builds the position tables; call once after the weights are final."""
        weight = self.norm.weight
        sinusoid_PD = sinusoid_table(num_positions, self.config.model_dim).to(weight)
        for layer in self.layers:
            cast(ConformerLayer, layer).attention.tabulate_positions(sinusoid_PD)

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        """(B, W, F) normalised features to (B, T, D).

        A row whose window is only partly real gives garbage in its last frames; they are outside
        `layout.valid_BK`, so no real frame sees them.
        """
        x_ND = self.subsampling(features_BWF)
        layers = [cast(ConformerLayer, layer) for layer in self.layers]
        following = [*(layer.first_norm for layer in layers[1:]), self.norm]
        normed_ND = layers[0].first_norm(x_ND)
        conv = caches.states[CONV_STATE]
        conv_LBKD = conv.gather()
        tails: list[Tensor] = []
        for index, layer in enumerate(layers):
            context = LayerContext(
                caches.first_key_position_B, conv_LBKD[index], next_norm=following[index]
            )
            x_ND, normed_ND, tail_BKD = layer(x_ND, normed_ND, caches.kv[index], context=context)
            tails.append(tail_BKD)
        conv.scatter(torch.stack(tails))
        num_rows = caches.first_key_position_B.shape[0]
        return cast(Tensor, normed_ND).view(num_rows, -1, self.config.model_dim)
