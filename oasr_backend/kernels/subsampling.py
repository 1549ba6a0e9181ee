"""Convolution and ReLU of the subsampling, channels last.

Shape letters: B rows, C channels, H and W height (frames) and width (mel bins) of the input,
Y and X of the output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.kernels.launch import use_kernel


def convolution_relu(x_BCHW: Tensor, convolution: nn.Conv2d) -> Tensor:
    """relu(convolution(x)) without padding, as a channels-last tensor."""
    if convolution.in_channels == 1 and use_kernel(x_BCHW):
        from oasr_backend.kernels.subsampling_kernel import launch_first_convolution

        return launch_first_convolution(x_BCHW, convolution)
    if x_BCHW.is_cuda:
        fused: Tensor = torch.cudnn_convolution_relu(
            x_BCHW, convolution.weight, convolution.bias, convolution.stride, (0, 0), (1, 1), 1
        )
        return fused
    return convolution_relu_definition(x_BCHW, convolution)


def convolution_relu_definition(x_BCHW: Tensor, convolution: nn.Conv2d) -> Tensor:
    return F.relu(convolution(x_BCHW))
