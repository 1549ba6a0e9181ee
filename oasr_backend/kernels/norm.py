"""Residual addition and the layer norms that follow it, in one pass over the rows.

The residual stream is float32 whatever the dtype of the weights: it is added to in every block.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.kernels.launch import use_kernel


def add_layer_norm(
    x_BTD: Tensor, change_BTD: Tensor, norm: nn.LayerNorm, outer: nn.LayerNorm | None = None
) -> tuple[Tensor, Tensor]:
    """The new residual (float32) and its norm (the weights' dtype) for the block that follows.

    Residual: x + change, or outer(x + change) where a layer ends with a norm of its own.
    """
    if not use_kernel(x_BTD):
        return add_layer_norm_definition(x_BTD, change_BTD, norm, outer)
    from oasr_backend.kernels.norm_kernel import launch_add_layer_norm

    return launch_add_layer_norm(x_BTD, change_BTD, norm, outer)


def add_layer_norm_definition(
    x_BTD: Tensor, change_BTD: Tensor, norm: nn.LayerNorm, outer: nn.LayerNorm | None = None
) -> tuple[Tensor, Tensor]:
    sum_BTD = x_BTD.float() + change_BTD
    if outer is not None:
        sum_BTD = _layer_norm(sum_BTD, outer)
    return sum_BTD, _layer_norm(sum_BTD, norm).to(norm.weight.dtype)


def _layer_norm(x_BTD: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(
        x_BTD, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps
    )
