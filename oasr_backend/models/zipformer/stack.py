"""A layer of the Zipformer (Yao et al., "Zipformer", 2024, section 3.1) and a stack of them.

Shape letters: B rows, T new frames at the stack's rate, N = B * T, M = N * downsampling frames of
what surrounds the stack, s frames of one average, D width of the stack, X any other width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from oasr_backend.kernels import SlotRows, average_frames, bypass, norm_bypass
from oasr_backend.kernels.traced import is_traced
from oasr_backend.models.zipformer.config import StackConfig, StackFrames
from oasr_backend.models.zipformer.parts import (
    AttentionWeights,
    BiasNorm,
    Block,
    Bypass,
    ConvolutionBlock,
    FeedForward,
    NonlinAttention,
    SelfAttention,
)


class LayerStates(NamedTuple):
    """What one layer keeps of each row, in the order of `config.LAYER_STATES`."""

    key: SlotRows
    nonlin: SlotRows
    value1: SlotRows
    value2: SlotRows
    conv1: SlotRows
    conv2: SlotRows


class LayerFrames(NamedTuple):
    """The newest frames of each of `LayerStates`: (B, T, X)."""

    key: Tensor
    nonlin: Tensor
    value1: Tensor
    value2: Tensor
    conv1: Tensor
    conv2: Tensor


class ZipformerLayer(nn.Module):
    """Eight blocks on one residual, two of them with a bypass behind them."""

    def __init__(self, config: StackConfig, pos_dim: int) -> None:
        super().__init__()
        first, second, third = config.feed_forward_dims
        self.self_attn_weights = AttentionWeights(config, pos_dim)
        self.feed_forward1 = FeedForward(config.dim, first)
        self.nonlin_attention = NonlinAttention(config)
        self.self_attn1 = SelfAttention(config)
        self.conv_module1 = ConvolutionBlock(config)
        self.feed_forward2 = FeedForward(config.dim, second)
        self.bypass_mid = Bypass(config.dim)
        self.self_attn2 = SelfAttention(config)
        self.conv_module2 = ConvolutionBlock(config)
        self.feed_forward3 = FeedForward(config.dim, third)
        self.norm = BiasNorm(config.dim)
        self.bypass = Bypass(config.dim)
        self._frames = 0
        self.register_buffer("last_bias", torch.zeros(config.dim), persistent=False)

    last_bias: Tensor

    def fold(self, frames: StackFrames) -> None:
        """Makes constants of all that follows from the weights and the chunk."""
        self._frames = frames.chunk
        self.norm.fold()
        self.self_attn_weights.fold(frames)
        for convolution in (self.conv_module1, self.conv_module2):
            convolution.depthwise_conv.fold(frames.chunk)
        missing_D = torch.zeros_like(self.last_bias)
        for block in (
            self.feed_forward1, self.nonlin_attention, self.self_attn1, self.conv_module1,
            self.feed_forward2,
        ):  # fmt: skip
            missing_D = block.fold(missing_D)
        missing_D = missing_D * self.bypass_mid.bypass_scale.detach()
        for block in (self.self_attn2, self.conv_module2, self.feed_forward3):
            missing_D = block.fold(missing_D)
        # The norm has to see the whole residual.
        self.last_bias = missing_D

    def forward(
        self, x0_ND: Tensor, num_seen_B: Tensor, states: LayerStates
    ) -> tuple[Tensor, LayerFrames]:
        """(N, D) to (N, D), and the newest frames of every state."""
        frames = self._frames
        weights_BHTK, key = self.self_attn_weights(x0_ND, states.key, num_seen_B, frames)
        out_proj = self.feed_forward1.out_proj
        x_ND = torch.addmm(x0_ND, self.feed_forward1(x0_ND), out_proj.weight.t())
        change_NX, nonlin = self.nonlin_attention(x_ND, weights_BHTK, states.nonlin, frames)
        x_ND = _added(x_ND, change_NX, self.nonlin_attention)
        change_NX, value1 = self.self_attn1(x_ND, weights_BHTK, states.value1, frames)
        x_ND = _added(x_ND, change_NX, self.self_attn1)
        change_NX, conv1 = self.conv_module1(x_ND, states.conv1, frames)
        x_ND = _added(x_ND, change_NX, self.conv_module1)
        x_ND = _added(x_ND, self.feed_forward2(x_ND), self.feed_forward2)
        x_ND = bypass(x0_ND, x_ND, self.bypass_mid.bypass_scale)
        change_NX, value2 = self.self_attn2(x_ND, weights_BHTK, states.value2, frames)
        x_ND = _added(x_ND, change_NX, self.self_attn2)
        change_NX, conv2 = self.conv_module2(x_ND, states.conv2, frames)
        x_ND = _added(x_ND, change_NX, self.conv_module2)
        x_ND = _added(x_ND, self.feed_forward3(x_ND), self.feed_forward3)
        norm, kept_D = self.norm, self.bypass.bypass_scale
        x_ND = norm_bypass(x0_ND, x_ND, norm.bias, norm.scale, kept_D, self.last_bias)
        return x_ND, LayerFrames(key, nonlin, value1, value2, conv1, conv2)


def _added(x_ND: Tensor, change_NX: Tensor, block: Block) -> Tensor:
    """The residual with a block's product added, in the memory of `x` where there is memory."""
    weight_XD = block.out_proj.weight.t()
    if is_traced():
        return torch.addmm(x_ND, change_NX, weight_XD)
    return x_ND.addmm_(change_NX, weight_XD)


class Downsample(nn.Module):
    """Weighted averages of frames; the weights are the softmax of `bias`."""

    share_s: Tensor

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(rate))
        self.register_buffer("share_s", torch.full((rate,), 1 / rate), persistent=False)

    def fold(self) -> None:
        self.share_s = self.bias.detach().softmax(dim=0)

    def forward(self, x_MD: Tensor) -> Tensor:
        """(M, D) to (N, D)."""
        return average_frames(x_MD, self.share_s)


class ZipformerStack(nn.Module):
    """Layers at one rate; at one below 50 Hz they see averages, and their frames are repeated."""

    def __init__(self, config: StackConfig, pos_dim: int) -> None:
        super().__init__()
        self.config = config
        self.downsample = Downsample(config.downsampling) if config.downsampling > 1 else None
        layers = [ZipformerLayer(config, pos_dim) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        # The same, typed: a ModuleList forgets of which class they are.
        self._layers = layers
        self.out_combiner = Bypass(config.dim) if config.downsampling > 1 else None

    def fold(self, frames: StackFrames) -> None:
        if self.downsample is not None:
            self.downsample.fold()
        for layer in self._layers:
            layer.fold(frames)

    def forward(
        self, x0_MD: Tensor, num_seen_B: Tensor, states: list[LayerStates]
    ) -> tuple[Tensor, list[LayerFrames]]:
        """(M, D) to (M, D), and the newest frames of every layer."""
        x_ND = x0_MD if self.downsample is None else self.downsample(x0_MD)
        newest = []
        for layer, state in zip(self._layers, states, strict=True):
            x_ND, frames = layer(x_ND, num_seen_B, state)
            newest.append(frames)
        if self.out_combiner is None:
            return x_ND, newest
        x0_NsD = x0_MD.view(-1, self.config.downsampling, self.config.dim)
        x_NsD = bypass(x0_NsD, x_ND.unsqueeze(1), self.out_combiner.bypass_scale)
        return x_NsD.view(-1, self.config.dim), newest
