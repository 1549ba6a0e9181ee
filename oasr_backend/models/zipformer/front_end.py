"""From mel features at 100 Hz to the first stack's frames at 50 Hz.

Shape letters: B rows, W feature frames of a window, F mel bins, c frames of a chunk, H = c + 3
frames behind the convolutions, C channels, M mel columns, N = B * c, D width of the first stack.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.cache import StagedSlotTensor
from oasr_backend.kernels import (
    ConvNeXtWeights,
    SlotRows,
    conv_next,
    convolution_swoosh,
    inner_channels_first,
    taps_first,
)
from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.traced import static
from oasr_backend.models.zipformer.config import LOOKAHEAD, ZipformerConfig
from oasr_backend.models.zipformer.parts import BiasNorm


class Convolution(nn.Conv2d):
    """A 3x3 convolution and SwooshR, without padding in time."""

    taps_KC: Tensor

    def __init__(
        self, in_channels: int, channels: int, stride: tuple[int, int], padding: int = 0
    ) -> None:
        super().__init__(in_channels, channels, 3, stride=stride, padding=(0, padding))
        self.register_buffer("taps_KC", torch.zeros(1, channels), persistent=False)

    def fold(self) -> None:
        self.taps_KC = inner_channels_first(self)

    def forward(self, x_BCHM: Tensor) -> Tensor:
        return convolution_swoosh(x_BCHM, self, self.taps_KC)


class ConvNeXt(nn.Module):
    """A depthwise convolution over three frames to either side, then two pointwise layers."""

    taps_Ck: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        size = 2 * LOOKAHEAD + 1
        # The frames before the window come from the state, so that no axis of time is padded.
        self.depthwise_conv = nn.Conv2d(
            channels, channels, size, groups=channels, padding=(0, LOOKAHEAD)
        )
        self.pointwise_conv1 = nn.Conv2d(channels, 3 * channels, 1)
        self.pointwise_conv2 = nn.Conv2d(3 * channels, channels, 1)
        self.register_buffer("taps_Ck", torch.zeros(channels, size * size), persistent=False)

    def fold(self) -> None:
        self.taps_Ck = taps_first(self.depthwise_conv.weight.detach().flatten(1))

    def forward(self, x_BCHM: Tensor, before: SlotRows) -> Tensor:
        """(B, C, c + 3, M) and the 3 frames before them to (B, C, c, M)."""
        weights = ConvNeXtWeights(
            self.depthwise_conv, self.taps_Ck, self.pointwise_conv1, self.pointwise_conv2
        )
        return conv_next(x_BCHM, before, weights)


class FrontEnd(nn.Module):
    """Three convolutions, a ConvNeXt that hears 3 frames ahead, a projection and a norm."""

    #: The weight of `out` for channels that lie innermost.
    out_DX: Tensor

    def __init__(self, config: ZipformerConfig) -> None:
        super().__init__()
        first, second, third = config.conv_channels
        # The names are those of the trained sequence, whose other members hold no weights.
        convolutions = {
            "0": Convolution(1, first, (1, 1), padding=1),
            "4": Convolution(first, second, (2, 2)),
            "7": Convolution(second, third, (1, 2)),
        }
        self.conv = nn.ModuleDict(convolutions)
        # The same, typed: a ModuleDict forgets of which class they are.
        self._convolutions = list(convolutions.values())
        self.convnext = ConvNeXt(third)
        self.out = nn.Linear(third * config.embed_columns, config.stacks[0].dim)
        self.out_norm = BiasNorm(config.stacks[0].dim)
        self.register_buffer("out_DX", torch.zeros(config.stacks[0].dim, 1), persistent=False)

    def fold(self) -> None:
        """Stores weights again in the order in which kernels read them."""
        for convolution in self._convolutions:
            convolution.fold()
        self.convnext.fold()
        self.out_norm.fold()
        weight_DX = self.out.weight.detach()
        weight_DCM = weight_DX.view(len(weight_DX), self._convolutions[-1].out_channels, -1)
        self.out_DX = weight_DCM.transpose(1, 2).flatten(1)

    def forward(self, features_BWF: Tensor, state: StagedSlotTensor) -> Tensor:
        """(B, 2c + 13, F) windows to (N, D) frames; the next state is scattered."""
        x_BCHM = features_BWF.unsqueeze(1)
        for convolution in self._convolutions:
            x_BCHM = convolution(x_BCHM)
        heard_BCHM = x_BCHM[:, :, : static(x_BCHM.shape[2]) - LOOKAHEAD]
        x_BCHM = self.convnext(x_BCHM, state)
        state.scatter(_last_frames(state, heard_BCHM))
        normed_ND: Tensor = self.out_norm(self._projected(x_BCHM))
        return normed_ND

    def _projected(self, x_BCHM: Tensor) -> Tensor:
        """(N, D); a kernel's channels lie innermost already."""
        if use_kernel(x_BCHM):
            x_NX = x_BCHM.permute(0, 2, 3, 1).reshape(-1, self.out.in_features)
            return F.linear(x_NX, self.out_DX, self.out.bias)
        projected_ND: Tensor = self.out(x_BCHM.transpose(1, 2).reshape(-1, self.out.in_features))
        return projected_ND


def _last_frames(before: SlotRows, heard_BCHM: Tensor) -> Tensor:
    """The last 3 of both; a chunk of 2 frames leaves one of those before it."""
    frames = static(heard_BCHM.shape[2])
    if frames >= LOOKAHEAD:
        return heard_BCHM[:, :, frames - LOOKAHEAD :]
    return torch.cat((before.gather()[:, :, frames:], heard_BCHM), dim=2)
