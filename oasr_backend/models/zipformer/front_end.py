"""From mel features at 100 Hz to the first stack's frames at 50 Hz.

Shape letters: B rows, W feature frames of a window, F mel bins, c frames of a chunk, H = c + 3
frames behind the convolutions, C channels, M mel columns, N = B * c, D width of the first stack.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oasr_backend.cache import StagedSlotTensor
from oasr_backend.kernels import swoosh_l, swoosh_r
from oasr_backend.kernels.traced import static
from oasr_backend.models.zipformer.config import LOOKAHEAD, ZipformerConfig
from oasr_backend.models.zipformer.parts import BiasNorm


class ConvNeXt(nn.Module):
    """A depthwise convolution over three frames to either side, then two pointwise layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        size = 2 * LOOKAHEAD + 1
        # The frames before the window come from the state, so that no axis of time is padded.
        self.depthwise_conv = nn.Conv2d(
            channels, channels, size, groups=channels, padding=(0, LOOKAHEAD)
        )
        self.pointwise_conv1 = nn.Conv2d(channels, 3 * channels, 1)
        self.pointwise_conv2 = nn.Conv2d(3 * channels, channels, 1)

    def forward(self, x_BCHM: Tensor, before_BCHM: Tensor) -> Tensor:
        """(B, C, c + 3, M) and the 3 frames before them to (B, C, c, M)."""
        frames = static(x_BCHM.shape[2]) - LOOKAHEAD
        window_BCHM = torch.cat((before_BCHM, x_BCHM), dim=2)
        hidden_BCHM = swoosh_l(self.pointwise_conv1(self.depthwise_conv(window_BCHM)))
        change_BCHM: Tensor = self.pointwise_conv2(hidden_BCHM)
        return x_BCHM[:, :, :frames] + change_BCHM


class FrontEnd(nn.Module):
    """Three convolutions, a ConvNeXt that hears 3 frames ahead, a projection and a norm."""

    def __init__(self, config: ZipformerConfig) -> None:
        super().__init__()
        first, second, third = config.conv_channels
        # The names are those of the trained sequence, whose other members hold no weights.
        self.conv = nn.ModuleDict({
            "0": nn.Conv2d(1, first, 3, padding=(0, 1)),
            "4": nn.Conv2d(first, second, 3, stride=2),
            "7": nn.Conv2d(second, third, 3, stride=(1, 2)),
        })  # fmt: skip
        self.convnext = ConvNeXt(third)
        self.out = nn.Linear(third * config.embed_columns, config.stacks[0].dim)
        self.out_norm = BiasNorm(config.stacks[0].dim)

    def forward(self, features_BWF: Tensor, state: StagedSlotTensor) -> Tensor:
        """(B, 2c + 13, F) windows to (N, D) frames; the next state is scattered."""
        x_BCHM = features_BWF.unsqueeze(1)
        for convolution in self.conv.values():
            x_BCHM = swoosh_r(convolution(x_BCHM))
        frames = static(x_BCHM.shape[2]) - LOOKAHEAD
        before_BCHM = state.gather()
        state.scatter(_last_frames(before_BCHM, x_BCHM[:, :, :frames]))
        x_BCHM = self.convnext(x_BCHM, before_BCHM)
        x_ND = self.out(x_BCHM.transpose(1, 2).reshape(-1, self.out.in_features))
        normed_ND: Tensor = self.out_norm(x_ND)
        return normed_ND


def _last_frames(before_BCHM: Tensor, heard_BCHM: Tensor) -> Tensor:
    """The last 3 of both; a chunk of 2 frames leaves one of those before it."""
    frames = static(heard_BCHM.shape[2])
    if frames >= LOOKAHEAD:
        return heard_BCHM[:, :, frames - LOOKAHEAD :]
    return torch.cat((before_BCHM[:, :, frames:], heard_BCHM), dim=2)
