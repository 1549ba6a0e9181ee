"""The Zipformer's activations (Yao et al., "Zipformer", 2024, section 3.3) and its tanh gate.

Shape letters: B rows, T frames, D channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.operands import L_OFFSET, L_SHIFT, R_OFFSET, R_SHIFT, SLOPE
from oasr_backend.kernels.precision import cast, widened
from oasr_backend.kernels.traced import is_traced, swoosh_traced


def swoosh_l(x: Tensor) -> Tensor:
    """log(1 + exp(x - 4)) - 0.08 x - 0.035, at least in float32 inside."""
    if not use_kernel(x):
        return swoosh_definition(x, L_SHIFT, L_OFFSET)
    from oasr_backend.kernels.swoosh_kernel import launch_swoosh

    return launch_swoosh(x, L_SHIFT, L_OFFSET)


def swoosh_r(x: Tensor) -> Tensor:
    """log(1 + exp(x - 1)) - 0.08 x - 0.313261687, at least in float32 inside."""
    if not use_kernel(x):
        return swoosh_definition(x, R_SHIFT, R_OFFSET)
    from oasr_backend.kernels.swoosh_kernel import launch_swoosh

    return launch_swoosh(x, R_SHIFT, R_OFFSET)


def swoosh_definition(x: Tensor, shift: float, offset: float) -> Tensor:
    if is_traced():
        return swoosh_traced(x, shift, offset, SLOPE)
    wide = widened(x)
    return cast(F.softplus(wide - shift) - (wide * SLOPE + offset), x.dtype)


def tanh_gate(gate_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    """x * tanh(gate), contiguous; both may be slices of one wider tensor."""
    if not use_kernel(x_BTD):
        return tanh_gate_definition(gate_BTD, x_BTD)
    from oasr_backend.kernels.swoosh_kernel import launch_tanh_gate

    return launch_tanh_gate(gate_BTD, x_BTD)


def tanh_gate_definition(gate_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    return cast(widened(x_BTD) * torch.tanh(widened(gate_BTD)), x_BTD.dtype)
