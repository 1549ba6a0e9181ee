"""Triton kernel of `add_layer_norm`. M rows, D model dimension."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from oasr_backend.kernels.launch import next_power_of_two, on_its_device

_ROWS = 4


@triton.jit
def _layer_norm(
    x_RD, weight_ptr, bias_ptr, column_1D, eps, D: tl.constexpr
):  # fmt: skip
    real_1D = column_1D < D
    mean_R1 = tl.sum(tl.where(real_1D, x_RD, 0.0), axis=1, keep_dims=True) / D
    centred_RD = tl.where(real_1D, x_RD - mean_R1, 0.0)
    variance_R1 = tl.sum(centred_RD * centred_RD, axis=1, keep_dims=True) / D
    weight_1D = tl.load(weight_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
    bias_1D = tl.load(bias_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
    return centred_RD * tl.rsqrt(variance_R1 + eps) * weight_1D + bias_1D


@triton.jit
def _add_layer_norm(
    x_ptr, change_ptr, outer_weight_ptr, outer_bias_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr,
    num_rows, outer_eps, eps,
    D: tl.constexpr, HAS_OUTER: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row_R1 = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column_1D = tl.arange(0, BLOCK_D)[None, :]
    inside_RD = (row_R1 < num_rows) & (column_1D < D)
    offset_RD = row_R1.to(tl.int64) * D + column_1D
    x_RD = tl.load(x_ptr + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
    x_RD += tl.load(change_ptr + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
    if HAS_OUTER:
        x_RD = _layer_norm(x_RD, outer_weight_ptr, outer_bias_ptr, column_1D, outer_eps, D)
    tl.store(sum_ptr + offset_RD, x_RD, mask=inside_RD)
    out_RD = _layer_norm(x_RD, weight_ptr, bias_ptr, column_1D, eps, D)
    tl.store(out_ptr + offset_RD, out_RD.to(out_ptr.dtype.element_ty), mask=inside_RD)


@on_its_device
def launch_add_layer_norm(
    x_BTD: Tensor, change_BTD: Tensor, norm: nn.LayerNorm, outer: nn.LayerNorm | None
) -> tuple[Tensor, Tensor]:
    x_BTD, change_BTD = x_BTD.contiguous(), change_BTD.contiguous()
    sum_BTD = torch.empty_like(x_BTD, dtype=torch.float32)
    out_BTD = torch.empty_like(x_BTD, dtype=norm.weight.dtype)
    model_dim = x_BTD.shape[-1]
    num_rows = x_BTD.numel() // model_dim
    first = outer or norm
    _add_layer_norm[(triton.cdiv(num_rows, _ROWS),)](
        x_BTD, change_BTD, first.weight, first.bias, norm.weight, norm.bias, sum_BTD, out_BTD,
        num_rows, first.eps, norm.eps,
        D=model_dim, HAS_OUTER=outer is not None, BLOCK_D=next_power_of_two(model_dim), ROWS=_ROWS,
    )  # fmt: skip
    return sum_BTD, out_BTD
