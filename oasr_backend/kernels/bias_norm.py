"""The Zipformer's norm and the bypass around a layer (Yao et al., "Zipformer", 2024, 3.1 and 3.2).

    norm(x) = x * scale / sqrt(mean((x - bias)^2))        bypass(x0, x) = x0 + (x - x0) * bypass

The mean runs over the channels; nothing is added to it. Shape letters: X any axes, D channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.precision import cast, widened
from oasr_backend.kernels.traced import constant, is_traced, static


def bias_norm(x_XD: Tensor, bias_D: Tensor, scale: Tensor) -> Tensor:
    """At least in float32 inside; `x`'s dtype comes out. `scale` has no axis."""
    if not use_kernel(x_XD):
        return bias_norm_definition(x_XD, bias_D, scale)
    from oasr_backend.kernels.bias_norm_kernel import launch_bias_norm

    return launch_bias_norm(x_XD, bias_D, scale)


def bypass(x0_XD: Tensor, x_XD: Tensor, scale_D: Tensor) -> Tensor:
    """x0 + (x - x0) * scale, in `x0`'s dtype. (N, 1, D) of `x` goes with (N, s, D) of `x0`."""
    if not use_kernel(x0_XD):
        return bypass_definition(x0_XD, x_XD, scale_D)
    from oasr_backend.kernels.bias_norm_kernel import launch_bypass

    return launch_bypass(x0_XD, x_XD, scale_D)


def norm_bypass(
    x0_XD: Tensor,
    x_XD: Tensor,
    bias_D: Tensor,
    scale: Tensor,
    bypass_D: Tensor,
    missing_D: Tensor | None = None,
) -> Tensor:
    """bypass(x0, bias_norm(x + missing)) in one pass, in `x0`'s dtype."""
    if not use_kernel(x0_XD):
        return norm_bypass_definition(x0_XD, x_XD, bias_D, scale, bypass_D, missing_D)
    from oasr_backend.kernels.bias_norm_kernel import launch_norm_bypass

    return launch_norm_bypass(x0_XD, x_XD, bias_D, scale, bypass_D, missing_D)


def bias_norm_definition(x_XD: Tensor, bias_D: Tensor, scale: Tensor) -> Tensor:
    return cast(_normed(x_XD, bias_D, scale), x_XD.dtype)


def bypass_definition(x0_XD: Tensor, x_XD: Tensor, scale_D: Tensor) -> Tensor:
    return _bypassed(x0_XD, widened(x_XD), scale_D)


def norm_bypass_definition(
    x0_XD: Tensor,
    x_XD: Tensor,
    bias_D: Tensor,
    scale: Tensor,
    bypass_D: Tensor,
    missing_D: Tensor | None = None,
) -> Tensor:
    if missing_D is not None:
        x_XD = widened(x_XD) + widened(missing_D)
    return _bypassed(x0_XD, _normed(x_XD, bias_D, scale), bypass_D)


def _normed(x_XD: Tensor, bias_D: Tensor, scale: Tensor) -> Tensor:
    wide_XD = widened(x_XD)
    centred_XD = wide_XD - widened(bias_D)
    if is_traced():
        length_X1: Tensor = torch.linalg.vector_norm(centred_XD, dim=-1, keepdim=True)
        return wide_XD * (constant(scale * math.sqrt(static(x_XD.shape[-1]))) / length_X1)
    mean_X1 = (centred_XD * centred_XD).mean(dim=-1, keepdim=True)
    return wide_XD * (widened(scale) / mean_X1.sqrt())


def _bypassed(x0_XD: Tensor, wide_XD: Tensor, scale_D: Tensor) -> Tensor:
    wide0_XD = widened(x0_XD)
    return cast(wide0_XD + (wide_XD - wide0_XD) * widened(scale_D), x0_XD.dtype)
