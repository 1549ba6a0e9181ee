"""The Zipformer's convolution module between its products: gate, two depthwise sums, SwooshR.

    gated = x * sigmoid(gate)
    mixed = swoosh_r(causal([state, gated]) + scale * chunk(gated))

The causal kernel reaches back into the frames before the chunk. That of the chunk lies around its
frame and sees zeros outside of the chunk (Yao et al., "Zipformer", 2024; icefall's causal form).

Shape letters: B rows, T new frames, D channels, E = 2D, k taps, L = k // 2 frames of state,
W = L + T.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.operands import R_OFFSET, R_SHIFT, ChunkConvolutionWeights, SlotRows
from oasr_backend.kernels.precision import cast
from oasr_backend.kernels.swoosh import swoosh_definition
from oasr_backend.kernels.traced import is_traced


def chunk_convolution(
    gate_BTE: Tensor, state: SlotRows, weights: ChunkConvolutionWeights
) -> tuple[Tensor, Tensor]:
    """(B, T, 2D), x then gate, to mixed (B, T, D) and gated (B, T, D).

    `state`: (B, L, D), the last L gated frames before the chunk; the caller rolls `gated` into it.
    """
    if not use_kernel(gate_BTE):
        return chunk_convolution_definition(gate_BTE, state, weights)
    from oasr_backend.kernels.chunk_convolution_kernel import launch_chunk_convolution

    return launch_chunk_convolution(gate_BTE, state, weights)


def taps_first(kernel_Dk: Tensor) -> Tensor:
    """The same kernel, stored with its channels side by side, as a GPU reads it fastest.

    The order survives `to(dtype)` and `to(device)`.
    """
    return kernel_Dk.t().contiguous().t()


def chunk_convolution_definition(
    gate_BTE: Tensor, state: SlotRows, weights: ChunkConvolutionWeights
) -> tuple[Tensor, Tensor]:
    gated_BTD = F.glu(gate_BTE, dim=-1)
    window_BWD = torch.cat((cast(state.gather(), gated_BTD.dtype), gated_BTD), dim=1)
    causal_B1TD = _depthwise(window_BWD, weights.causal_Dk, weights.causal_bias_D, padding=0)
    chunk_B1TD = _depthwise(
        gated_BTD, weights.chunk_Dk, weights.chunk_bias_D, padding=weights.state_frames
    )
    sum_B1TD = causal_B1TD + chunk_B1TD * weights.scale_TD
    # Its user flattens what is traced anyway.
    sum_BTD = sum_B1TD if is_traced() else sum_B1TD.squeeze(1)
    return swoosh_definition(sum_BTD, R_SHIFT, R_OFFSET), gated_BTD


def _depthwise(x_BTD: Tensor, kernel_Dk: Tensor, bias_D: Tensor, *, padding: int) -> Tensor:
    """(B, 1, T, D): one kernel a channel. What lies as channels-last needs no transposition."""
    mixed_BD1T = F.conv2d(
        x_BTD.unsqueeze(1).permute(0, 3, 1, 2),
        kernel_Dk.unsqueeze(1).unsqueeze(1),
        bias_D,
        padding=(0, padding),
        groups=kernel_Dk.shape[0],
    )
    return mixed_BD1T.permute(0, 2, 3, 1)
