"""Conformer encoder (Gulati et al., 2020) in streaming inference form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.kernels import add_layer_norm
from oasr_backend.models.base import EncoderCaches, EncoderSpec
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


@dataclass(frozen=True)
class ConformerConfig:
    """Sizes and options of one checkpoint. `head_dim` * `num_heads` may differ from `model_dim`."""

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
        """The norm of the first block, which whatever precedes the layer applies."""
        return self.attention.norm if self.macaron is None else self.macaron.norm

    def forward(
        self,
        x_BTD: Tensor,
        normed_BTD: Tensor,
        kv: PagedKVCache,
        *,
        context: LayerContext,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the residual and its first norm; returns both for what follows, and the next
        convolution state."""
        if self.macaron is not None:
            change_BTD = self.macaron(normed_BTD)
            x_BTD, normed_BTD = add_layer_norm(x_BTD, change_BTD, self.attention.norm)
        change_BTD = self.attention(normed_BTD, kv, context.first_position_B)
        x_BTD, normed_BTD = add_layer_norm(x_BTD, change_BTD, self.convolution.norm)
        change_BTD, tail_BKD = self.convolution(normed_BTD, context.conv_BKD)
        x_BTD, normed_BTD = add_layer_norm(x_BTD, change_BTD, self.feed_forward.norm)
        change_BTD = self.feed_forward(normed_BTD)
        x_BTD, normed_BTD = add_layer_norm(x_BTD, change_BTD, context.next_norm, self.norm)
        return x_BTD, normed_BTD, tail_BKD


class ConformerEncoder(nn.Module):
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
        config, kind = self.config, self.subsampling.kind
        return EncoderSpec(
            num_mel_bins=config.num_mel_bins,
            subsampling_rate=kind.rate,
            right_context_frames=kind.right_context_frames,
            model_dim=config.model_dim,
            num_kv_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            conv_kernel_size=config.conv_kernel_size,
        )

    def tabulate_positions(self, num_positions: int) -> None:
        """Builds the position tables; call once after the weights are final."""
        weight = self.norm.weight
        sinusoid_PD = sinusoid_table(num_positions, self.config.model_dim).to(weight)
        for layer in self.layers:
            cast(ConformerLayer, layer).attention.tabulate_positions(sinusoid_PD)

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> tuple[Tensor, Tensor]:
        """(B, W, F) normalised features to (B, T, D) and the next convolution state (L, B, K-1, D).

        A row whose window is only partly real gives garbage in its last frames; they are outside
        `layout.valid_BK`, so no real frame sees them.
        """
        x_BTD = self.subsampling(features_BWF)
        layers = [cast(ConformerLayer, layer) for layer in self.layers]
        following = [*(layer.first_norm for layer in layers[1:]), self.norm]
        normed_BTD = layers[0].first_norm(x_BTD)
        conv_LBKD = caches.conv.gather()
        tails: list[Tensor] = []
        for index, layer in enumerate(layers):
            context = LayerContext(
                caches.first_key_position_B, conv_LBKD[index], next_norm=following[index]
            )
            x_BTD, normed_BTD, tail_BKD = layer(
                x_BTD, normed_BTD, caches.kv[index], context=context
            )
            tails.append(tail_BKD)
        return normed_BTD, torch.stack(tails)
