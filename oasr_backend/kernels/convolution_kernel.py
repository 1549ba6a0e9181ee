"""Triton kernel of `gated_causal_convolution`: one program a few frames, all their channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import next_power_of_two, on_its_device
from oasr_backend.kernels.operands import ConvolutionWeights

#: Frames of one program; fewer leave narrow batches with enough programs to fill a GPU.
_FRAMES = 4


@triton.jit
def _window_rows(
    gate_ptr, state_ptr, rest_1D, row_R1, column_1D, keep_RD,
    STATE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rows of the window (state, gated frames minus their rest), zero where `keep_RD` is false."""
    old_RD = keep_RD & (row_R1 < STATE)
    new_RD = keep_RD & (row_R1 >= STATE)
    state_RD = tl.load(state_ptr + row_R1 * D + column_1D, mask=old_RD, other=0.0)
    frame_R1 = row_R1 - STATE
    value_RD = tl.load(gate_ptr + frame_R1 * (2 * D) + column_1D, mask=new_RD, other=0.0)
    gate_RD = tl.load(gate_ptr + frame_R1 * (2 * D) + D + column_1D, mask=new_RD, other=0.0)
    gated_RD = value_RD.to(tl.float32) / (1.0 + tl.exp(-gate_RD.to(tl.float32))) - rest_1D
    return tl.where(new_RD, gated_RD, state_RD.to(tl.float32))


@triton.jit
def _gated_causal_convolution(
    gate_ptr, state_ptr, rest_ptr, kernel_ptr, bias_ptr,
    norm_weight_ptr, norm_bias_ptr, out_ptr, tail_ptr, eps,
    T: tl.constexpr, D: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    STATE: tl.constexpr = K - 1
    stream = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    gate_ptr += stream * T * 2 * D
    state_ptr += stream * STATE * D
    column_1D = tl.arange(0, BLOCK_D)[None, :]
    real_1D = column_1D < D
    time_T1 = part * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    keep_TD = (time_T1 < T) & real_1D
    rest_1D = tl.load(rest_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
    bias_1D = tl.load(bias_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
    mixed_TD = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32) + bias_1D
    for tap in range(K):
        tap_1D = tl.load(kernel_ptr + column_1D * K + tap, mask=real_1D, other=0.0)
        mixed_TD += tap_1D.to(tl.float32) * _window_rows(
            gate_ptr, state_ptr, rest_1D, time_T1 + tap, column_1D, keep_TD, STATE, D
        )
    if HAS_NORM:
        mean_T1 = tl.sum(tl.where(real_1D, mixed_TD, 0.0), axis=1, keep_dims=True) / D
        centred_TD = tl.where(real_1D, mixed_TD - mean_T1, 0.0)
        variance_T1 = tl.sum(centred_TD * centred_TD, axis=1, keep_dims=True) / D
        weight_1D = tl.load(norm_weight_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
        offset_1D = tl.load(norm_bias_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
        mixed_TD = centred_TD * tl.rsqrt(variance_T1 + eps) * weight_1D + offset_1D
    out_TD = mixed_TD / (1.0 + tl.exp(-mixed_TD))
    out_ptr += stream * T * D
    tl.store(out_ptr + time_T1 * D + column_1D, out_TD.to(out_ptr.dtype.element_ty), mask=keep_TD)
    row_S1 = part * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    keep_SD = (row_S1 < STATE) & real_1D
    tail_SD = _window_rows(gate_ptr, state_ptr, rest_1D, row_S1 + T, column_1D, keep_SD, STATE, D)
    tail_ptr += stream * STATE * D
    tl.store(tail_ptr + row_S1 * D + column_1D, tail_SD.to(tail_ptr.dtype.element_ty), mask=keep_SD)


@on_its_device
def launch_gated_causal_convolution(
    gate_BTE: Tensor, state_BKD: Tensor, weights: ConvolutionWeights
) -> tuple[Tensor, Tensor]:
    gate_BTE, state_BKD = gate_BTE.contiguous(), state_BKD.contiguous()
    batch, num_frames, _ = gate_BTE.shape
    channels = state_BKD.shape[-1]
    out_BTD = gate_BTE.new_empty((batch, num_frames, channels))
    tail_BKD = torch.empty_like(state_BKD)
    norm = weights.norm
    depthwise = weights.depthwise
    parts = triton.cdiv(num_frames, _FRAMES)
    _gated_causal_convolution[(batch, parts)](
        gate_BTE, state_BKD, weights.rest_D, depthwise.weight, depthwise.bias,
        norm.weight if norm is not None else depthwise.bias,
        norm.bias if norm is not None else depthwise.bias,
        out_BTD, tail_BKD, norm.eps if norm is not None else 0.0,
        T=num_frames, D=channels, K=weights.kernel_size, HAS_NORM=norm is not None,
        BLOCK_T=_FRAMES,
        BLOCK_S=next_power_of_two(triton.cdiv(weights.kernel_size - 1, parts)),
        BLOCK_D=next_power_of_two(channels),
    )  # fmt: skip
    return out_BTD, tail_BKD
