"""Convolutional subsampling of log-mel frames (WeNet's conv2d, conv2d6 and conv2d8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from oasr_backend.kernels import convolution_relu


@dataclass(frozen=True)
class SubsamplingKind:
    """Kernel size and stride of each square convolution, first to last."""

    stages: tuple[tuple[int, int], ...]

    @property
    def rate(self) -> int:
        """Feature frames per encoder frame."""
        rate = 1
        for _, stride in self.stages:
            rate *= stride
        return rate

    @property
    def right_context_frames(self) -> int:
        """Feature frames after the first that one encoder frame needs."""
        frames, rate = 0, 1
        for kernel, stride in self.stages:
            frames += (kernel - 1) * rate
            rate *= stride
        return frames

    def output_frames(self, num_frames: int) -> int:
        """Encoder frames that `num_frames` feature frames (or mel bins) give."""
        for kernel, stride in self.stages:
            num_frames = max(0, (num_frames - kernel) // stride + 1)
        return num_frames


SUBSAMPLING_KINDS = {
    "conv2d": SubsamplingKind(((3, 2), (3, 2))),
    "conv2d6": SubsamplingKind(((3, 2), (5, 3))),
    "conv2d8": SubsamplingKind(((3, 2), (3, 2), (3, 2))),
}


class Conv2dSubsampling(nn.Module):
    """(B, W, F) feature windows to (B, T, D). Convolutions run channels-last.

    The projection's columns are ordered (mel, channel); checkpoints hold (channel, mel).
    """

    def __init__(self, kind: SubsamplingKind, num_mel_bins: int, model_dim: int) -> None:
        super().__init__()
        self.kind = kind
        channels = [1] + [model_dim] * len(kind.stages)
        self.stages = nn.ModuleList(
            nn.Conv2d(channels[i], channels[i + 1], kernel, stride)
            for i, (kernel, stride) in enumerate(kind.stages)
        )
        self.project = nn.Linear(model_dim * kind.output_frames(num_mel_bins), model_dim)

    def forward(self, features_BWF: Tensor) -> Tensor:
        x_BCTF = features_BWF.unsqueeze(1).to(memory_format=torch.channels_last)
        for convolution in self.stages:
            x_BCTF = convolution_relu(x_BCTF, cast(nn.Conv2d, convolution))
        rows_NE = x_BCTF.permute(0, 2, 3, 1).reshape(-1, self.project.in_features)
        encoded_ND: Tensor = self.project(rows_NE)
        return encoded_ND
