"""The Zipformer's front end: convolutions with SwooshR behind them, and a ConvNeXt.

    convnext(x) = x + narrow(swoosh_l(widen(depthwise([before, x]))))

(Yao et al., "Zipformer", 2024; Liu et al., "A ConvNet for the 2020s", 2022). Kernels work channels
last: what they give is seen as (B, C, H, M) and lies as (B, H, M, C).

Shape letters: B rows, C channels, H frames, M mel columns, R frames that the ConvNeXt sees on
either side, T = H - R frames of its output, k = (2R + 1)^2 taps, K taps of all input channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.operands import (
    L_OFFSET,
    L_SHIFT,
    R_OFFSET,
    R_SHIFT,
    ConvNeXtWeights,
    SlotRows,
)
from oasr_backend.kernels.precision import cast
from oasr_backend.kernels.swoosh import swoosh_definition
from oasr_backend.kernels.traced import static

#: Channels of a ConvNeXt whose sums a program can hold.
MAX_CHANNELS = 128


def convolution_swoosh(x_BCHM: Tensor, convolution: nn.Conv2d, taps_KC: Tensor) -> Tensor:
    """swoosh_r(convolution(x)); `taps` is what `inner_channels_first` makes of its weight.

    A kernel pads nothing but the columns of a single input channel.
    """
    if not use_kernel(x_BCHM):
        return convolution_swoosh_definition(x_BCHM, convolution)
    from oasr_backend.kernels.front_end_kernel import launch_convolution, launch_first_convolution

    if convolution.in_channels == 1:
        return launch_first_convolution(x_BCHM, convolution)
    return launch_convolution(x_BCHM, convolution, taps_KC)


def convolution_swoosh_definition(x_BCHM: Tensor, convolution: nn.Conv2d) -> Tensor:
    mixed_BCHM = F.conv2d(
        x_BCHM, convolution.weight, convolution.bias, convolution.stride, convolution.padding
    )
    return swoosh_definition(mixed_BCHM, R_SHIFT, R_OFFSET)


def inner_channels_first(convolution: nn.Conv2d) -> Tensor:
    """(K, C) weights, in the order in which the window of an output lies, channels last."""
    weight_KC = convolution.weight.detach().permute(2, 3, 1, 0)
    return weight_KC.reshape(-1, convolution.out_channels).contiguous()


def conv_next(x_BCHM: Tensor, before: SlotRows, weights: ConvNeXtWeights) -> Tensor:
    """(B, C, T + R, M), and (B, C, R, M) as stored before it, to (B, C, T, M)."""
    if not use_kernel(x_BCHM) or x_BCHM.shape[1] > MAX_CHANNELS:
        return conv_next_definition(x_BCHM, before.gather(), weights)
    from oasr_backend.kernels.front_end_kernel import launch_depthwise, launch_pointwise

    mixed_BTMC = launch_depthwise(x_BCHM, before, weights)
    return launch_pointwise(mixed_BTMC, x_BCHM, weights)


def conv_next_definition(x_BCHM: Tensor, before_BCRM: Tensor, weights: ConvNeXtWeights) -> Tensor:
    frames = static(x_BCHM.shape[2]) - static(before_BCRM.shape[2])
    window_BCHM = torch.cat((cast(before_BCRM, x_BCHM.dtype), x_BCHM), dim=2)
    wide_BCTM = weights.widen(weights.depthwise(window_BCHM))
    hidden_BCTM = swoosh_definition(wide_BCTM, L_SHIFT, L_OFFSET)
    change_BCTM: Tensor = weights.narrow(hidden_BCTM)
    return x_BCHM[:, :, :frames] + change_BCTM
