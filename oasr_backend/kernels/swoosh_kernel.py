"""Triton kernels of `swoosh_l`, `swoosh_r` and `tanh_gate`: one element after another.

D channels of a row; N elements of one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import on_its_device
from oasr_backend.kernels.operands import SLOPE

#: Elements of one program. Few enough that one stream's frames keep many processors busy.
_ELEMENTS = 1024


@triton.jit
def swoosh(x, shift, offset, SLOPE: tl.constexpr):
    """log(1 + exp(x - shift)) - SLOPE * x - offset of float32, without overflow."""
    y = x - shift
    return tl.maximum(y, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(y))) - (x * SLOPE + offset)


@triton.jit
def _swoosh(
    x_ptr, out_ptr, num_elements, shift, offset, SLOPE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    place_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = place_N < num_elements
    x_N = tl.load(x_ptr + place_N, mask=inside_N, other=0.0).to(tl.float32)
    out_N = swoosh(x_N, shift, offset, SLOPE)
    tl.store(out_ptr + place_N, out_N.to(out_ptr.dtype.element_ty), mask=inside_N)


@triton.jit
def _tanh_gate(
    gate_ptr, x_ptr, out_ptr, num_elements, gate_row, x_row, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    place_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = place_N < num_elements
    row_N, column_N = place_N // D, place_N % D
    gate_N = tl.load(gate_ptr + row_N * gate_row + column_N, mask=inside_N, other=0.0)
    x_N = tl.load(x_ptr + row_N * x_row + column_N, mask=inside_N, other=0.0).to(tl.float32)
    gate_N = gate_N.to(tl.float32)
    shrink_N = tl.exp(-2.0 * tl.abs(gate_N))
    tanh_N = (1.0 - shrink_N) / (1.0 + shrink_N)
    out_N = x_N * tl.where(gate_N < 0.0, -tanh_N, tanh_N)
    tl.store(out_ptr + place_N, out_N.to(out_ptr.dtype.element_ty), mask=inside_N)


@on_its_device
def launch_swoosh(x: Tensor, shift: float, offset: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.numel()
    _swoosh[(triton.cdiv(size, _ELEMENTS),)](
        x, out, size, shift, offset, SLOPE=SLOPE, BLOCK_N=_ELEMENTS
    )
    return out


@on_its_device
def launch_tanh_gate(gate_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    gate_BTD, x_BTD = _even_rows(gate_BTD), _even_rows(x_BTD)
    out_BTD = x_BTD.new_empty(x_BTD.shape)
    size = out_BTD.numel()
    _tanh_gate[(triton.cdiv(size, _ELEMENTS),)](
        gate_BTD, x_BTD, out_BTD, size, gate_BTD.stride(-2), x_BTD.stride(-2),
        D=x_BTD.shape[-1], BLOCK_N=_ELEMENTS,
    )  # fmt: skip
    return out_BTD


def _even_rows(x_BTD: Tensor) -> Tensor:
    """`x`, or a copy where its rows do not lie equally far apart."""
    _, frames, _ = x_BTD.shape
    even = x_BTD.stride(2) == 1 and x_BTD.stride(0) == frames * x_BTD.stride(1)
    return x_BTD if even else x_BTD.contiguous()
