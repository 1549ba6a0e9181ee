"""The blocks of a Zipformer's layer, each up to the product that leads back to the residual.

Letters: N = B * T frames of all rows, B rows, T new frames, D width of the stack, E = 2D, X any
other width, F hidden, H heads, K keys, k taps.

The bias of a block's output product is not added to the residual, so that the product can be added
in place. Every block behind it has the sum of the biases that are missing in its own entry's bias
(`Block.fold`), and the last product of a layer has the rest in its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.kernels import (
    ChunkConvolutionWeights,
    HeadSizes,
    SlotRows,
    attend_window,
    bias_norm,
    chunk_attention_weights,
    chunk_convolution,
    swoosh_l,
    tanh_gate,
    taps_first,
)
from oasr_backend.models.zipformer.config import StackConfig, StackFrames
from oasr_backend.models.zipformer.positions import distances, encoded_distances


class BiasNorm(nn.Module):
    """`kernels.bias_norm` with weights; `scale` is the exponential of `log_scale`."""

    scale: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def fold(self) -> None:
        self.scale = self.log_scale.detach().exp()

    def forward(self, x_ND: Tensor) -> Tensor:
        return bias_norm(x_ND, self.bias, self.scale)


class Bypass(nn.Module):
    """How much of a change is kept, a factor a channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bypass_scale = nn.Parameter(torch.ones(dim))


class Block(nn.Module):
    """In by one product, out by another, whose bias the caller carries on."""

    entry_bias: Tensor

    def __init__(self, dim: int, in_width: int, out_width: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, in_width)
        self.out_proj = nn.Linear(out_width, dim)
        self.register_buffer("entry_bias", torch.zeros(in_width), persistent=False)

    def fold(self, missing_D: Tensor) -> Tensor:
        """`missing` is what the residual lacks at the block's entry; returns it for its exit."""
        weight, bias = self.in_proj.weight.detach(), self.in_proj.bias.detach()
        self.entry_bias = bias + weight @ missing_D
        return missing_D + self.out_proj.bias.detach()

    def entered(self, x_ND: Tensor) -> Tensor:
        return F.linear(x_ND, self.in_proj.weight, self.entry_bias)

    def flat(self, x_BTX: Tensor) -> Tensor:
        """(N, X) of (B, T, X), or of X in more axes."""
        return x_BTX.reshape(-1, self.out_proj.in_features)


class FeedForward(Block):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden, hidden)

    def forward(self, x_ND: Tensor) -> Tensor:
        return swoosh_l(self.entered(x_ND))


class AttentionWeights(nn.Module):
    """Which frames each frame heeds; three blocks of the layer use it."""

    position_SHP: Tensor

    def __init__(self, config: StackConfig, pos_dim: int) -> None:
        super().__init__()
        heads = config.num_heads
        self.sizes = HeadSizes(heads, config.query_head_dim, config.position_head_dim)
        self.key_dim = heads * config.query_head_dim
        width = 2 * self.key_dim + heads * config.position_head_dim
        self.in_proj = nn.Linear(config.dim, width)
        self.linear_pos = nn.Linear(pos_dim, heads * config.position_head_dim, bias=False)
        self.register_buffer("position_SHP", torch.zeros(1, 1, 1), persistent=False)

    def fold(self, frames: StackFrames) -> None:
        """Projects the encoding of every distance that occurs; they follow from no input."""
        weight = self.linear_pos.weight.detach()
        encoded_SP = encoded_distances(distances(frames.chunk, frames.left), weight.shape[1])
        position_SX = encoded_SP.to(weight.dtype) @ weight.t()
        self.position_SHP = position_SX.view(len(position_SX), self.sizes.num_heads, -1)

    def forward(
        self, x_ND: Tensor, key: SlotRows, num_seen_B: Tensor, frames: int
    ) -> tuple[Tensor, Tensor]:
        """(B, H, T, K) weights, and the new keys (B, T, X)."""
        qkp_BTX = self.in_proj(x_ND).view(-1, frames, self.in_proj.out_features)
        weights_BHTK = chunk_attention_weights(
            qkp_BTX, key, self.position_SHP, num_seen_B, self.sizes
        )
        return weights_BHTK, qkp_BTX[:, :, self.key_dim : 2 * self.key_dim]


class SelfAttention(Block):
    """Values of the window, mixed by weights that are given."""

    def __init__(self, config: StackConfig) -> None:
        width = config.num_heads * config.value_head_dim
        super().__init__(config.dim, width, width)

    def forward(
        self, x_ND: Tensor, weights_BHTK: Tensor, values: SlotRows, frames: int
    ) -> tuple[Tensor, Tensor]:
        """Mixed values (N, X), and the new values (B, T, X)."""
        new_BTX = self.entered(x_ND).view(-1, frames, self.in_proj.out_features)
        return self.flat(attend_window(weights_BHTK, values, new_BTX)), new_BTX


class NonlinAttention(Block):
    """Gated values, mixed by the first head's weights and gated again."""

    def __init__(self, config: StackConfig) -> None:
        self.width = config.nonlin_dim
        super().__init__(config.dim, 3 * config.nonlin_dim, config.nonlin_dim)

    def forward(
        self, x_ND: Tensor, weights_BHTK: Tensor, gated: SlotRows, frames: int
    ) -> tuple[Tensor, Tensor]:
        """Mixed values (N, X), and what the window keeps (B, T, X)."""
        x_BTX = self.entered(x_ND).view(-1, frames, self.in_proj.out_features)
        inner_BTX, value_BTX, outer_BTX = torch.split(x_BTX, self.width, dim=2)
        new_BTX = tanh_gate(inner_BTX, value_BTX)
        mixed_BTX = attend_window(weights_BHTK[:, :1], gated, new_BTX, outer_BTX)
        return self.flat(mixed_BTX), new_BTX


class Taps(nn.Module):
    """The weights of a depthwise convolution over time."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, 1, size))
        self.bias = nn.Parameter(torch.zeros(dim))

    def fold(self) -> Tensor:
        """(D, k), as kernels read it."""
        return taps_first(self.weight.detach().squeeze(1))


class DepthwiseConvolution(nn.Module):
    """A causal kernel, and one that sees the chunk alone, scaled by the place in the chunk."""

    causal_Dk: Tensor
    chunk_Dk: Tensor
    scale_TD: Tensor

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.causal_conv = Taps(dim, (kernel_size + 1) // 2)
        self.chunkwise_conv = Taps(dim, kernel_size)
        self.chunkwise_conv_scale = nn.Parameter(torch.zeros(2, dim, kernel_size))
        for name in ("causal_Dk", "chunk_Dk", "scale_TD"):
            self.register_buffer(name, torch.zeros(1, dim), persistent=False)

    def fold(self, frames: int) -> None:
        self.causal_Dk = self.causal_conv.fold()
        self.chunk_Dk = self.chunkwise_conv.fold()
        left_kD, right_kD = self.chunkwise_conv_scale.detach().transpose(1, 2)
        reach = min(frames, left_kD.shape[0])
        scale_TD = left_kD.new_ones(frames, left_kD.shape[1])
        scale_TD[:reach] += left_kD[:reach]
        scale_TD[frames - reach :] += right_kD[-reach:]
        self.scale_TD = scale_TD

    @property
    def weights(self) -> ChunkConvolutionWeights:
        return ChunkConvolutionWeights(
            self.causal_Dk,
            self.causal_conv.bias,
            self.chunk_Dk,
            self.chunkwise_conv.bias,
            self.scale_TD,
        )


class ConvolutionBlock(Block):
    def __init__(self, config: StackConfig) -> None:
        super().__init__(config.dim, 2 * config.dim, config.dim)
        self.depthwise_conv = DepthwiseConvolution(config.dim, config.conv_kernel_size)

    def forward(self, x_ND: Tensor, gated: SlotRows, frames: int) -> tuple[Tensor, Tensor]:
        """Activated sums (N, D), and the gated frames (B, T, D)."""
        gate_BTE = self.entered(x_ND).view(-1, frames, self.in_proj.out_features)
        mixed_BTD, gated_BTD = chunk_convolution(gate_BTE, gated, self.depthwise_conv.weights)
        return self.flat(mixed_BTD), gated_BTD
