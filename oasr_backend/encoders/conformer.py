"""Conformer encoder (Gulati et al., 2020) in streaming inference form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.encoders.base import EncoderCaches, EncoderSpec
from oasr_backend.encoders.layers import (
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

    def forward(
        self, x_BTD: Tensor, kv: PagedKVCache, *, position_BK: Tensor, conv_BKD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output and the convolution's next state."""
        if self.macaron is not None:
            x_BTD = self.macaron(x_BTD)
        x_BTD = self.attention(x_BTD, kv, position_BK)
        x_BTD, tail_BKD = self.convolution(x_BTD, conv_BKD)
        return self.norm(self.feed_forward(x_BTD)), tail_BKD


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
        for attention in self._attentions():
            attention.tabulate_positions(sinusoid_PD)

    @property
    def num_positions(self) -> int:
        """Absolute positions that the projected position tables cover."""
        return self._attentions()[0].position_PHC.shape[0]

    def _attentions(self) -> list[RelPositionAttention]:
        return [cast(ConformerLayer, layer).attention for layer in self.layers]

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> tuple[Tensor, Tensor]:
        """(B, W, F) normalised features to (B, T, D) and the next convolution state (L, B, K-1, D).

        A row whose window is only partly real gives garbage in its last frames; they are outside
        `layout.valid_BK`, so no real frame sees them.
        """
        x_BTD = self.subsampling(features_BWF)
        conv_LBKD = caches.conv.gather()
        position_BK = self._key_positions(caches)
        tails: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x_BTD, tail_BKD = layer(
                x_BTD, caches.kv[index], position_BK=position_BK, conv_BKD=conv_LBKD[index]
            )
            tails.append(tail_BKD)
        return self.norm(x_BTD), torch.stack(tails)

    def _key_positions(self, caches: EncoderCaches) -> Tensor:
        layout = caches.kv[0].layout
        steps_K = torch.arange(layout.num_frames, device=caches.first_key_position_B.device)
        position_BK = caches.first_key_position_B.unsqueeze(1) + steps_K
        # Columns past a row's last key may run past the table; they are masked, not read.
        return position_BK.clamp(max=self.num_positions - 1)
