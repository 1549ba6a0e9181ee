"""Residual addition and the layer norm that follows it, in one pass over the rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.kernels.launch import use_kernel


def add_layer_norm(x_BTD: Tensor, change_BTD: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """(x + change, norm(x + change))."""
    if not use_kernel(x_BTD):
        return add_layer_norm_definition(x_BTD, change_BTD, norm)
    from oasr_backend.kernels.norm_kernel import launch_add_layer_norm

    return launch_add_layer_norm(x_BTD, change_BTD, norm)


def add_layer_norm_definition(
    x_BTD: Tensor, change_BTD: Tensor, norm: nn.LayerNorm
) -> tuple[Tensor, Tensor]:
    sum_BTD = x_BTD + change_BTD
    return sum_BTD, F.layer_norm(sum_BTD, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
