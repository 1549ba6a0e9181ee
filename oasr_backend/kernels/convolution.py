"""Gate, causal depthwise convolution with state, norm and activation of the Conformer's module.

Shape letters: B rows, T new frames, K-1 frames of state, D channels; S = K-1 + T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.operands import ConvolutionWeights
from oasr_backend.kernels.traced import gated_causal_convolution_traced, is_traced

Activation = Callable[[Tensor], Tensor]


def gated_causal_convolution(
    gate_BTE: Tensor,
    state_BKD: Tensor,
    weights: ConvolutionWeights,
    *,
    activation: Activation = F.silu,
) -> tuple[Tensor, Tensor]:
    """(B, T, 2D) and (B, K-1, D) state to activation(norm(depthwise(...))) and the next state.

    The kernel knows one activation, swish.
    """
    if is_traced():
        return gated_causal_convolution_traced(gate_BTE, state_BKD, weights, activation)
    if activation is not F.silu or not use_kernel(gate_BTE):
        return gated_causal_convolution_definition(gate_BTE, state_BKD, weights, activation)
    from oasr_backend.kernels.convolution_kernel import launch_gated_causal_convolution

    return launch_gated_causal_convolution(gate_BTE, state_BKD, weights)


def gated_causal_convolution_definition(
    gate_BTE: Tensor,
    state_BKD: Tensor,
    weights: ConvolutionWeights,
    activation: Activation = F.silu,
) -> tuple[Tensor, Tensor]:
    window_BSD = torch.cat((state_BKD, F.glu(gate_BTE, dim=-1) - weights.rest_D), dim=1)
    # (B, S, D) read as channels-last (B, D, 1, S): the depthwise kernel needs no transposition.
    mixed_BDT = weights.depthwise(window_BSD.unsqueeze(1).permute(0, 3, 1, 2))
    mixed_BTD = mixed_BDT.permute(0, 2, 3, 1).squeeze(1)
    norm = weights.norm
    if norm is not None:
        mixed_BTD = F.layer_norm(mixed_BTD, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return activation(mixed_BTD), window_BSD[:, gate_BTE.shape[1] :]
