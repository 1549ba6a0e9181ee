"""Triton kernel of `bias_norm`, `bypass` and `norm_bypass`. R rows of one program, D channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import next_power_of_two, on_its_device

_ROWS = 4


@triton.jit
def _norm_bypass(
    x0_ptr, x_ptr, bias_ptr, scale_ptr, bypass_ptr, missing_ptr, out_ptr, num_rows,
    D: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BYPASS: tl.constexpr,
    HAS_MISSING: tl.constexpr, REPEAT: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row_R1 = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column_1D = tl.arange(0, BLOCK_D)[None, :]
    real_1D = column_1D < D
    inside_RD = (row_R1 < num_rows) & real_1D
    place_RD = row_R1.to(tl.int64) * D + column_1D
    x_place_RD = (row_R1 // REPEAT).to(tl.int64) * D + column_1D
    x_RD = tl.load(x_ptr + x_place_RD, mask=inside_RD, other=0.0).to(tl.float32)
    if HAS_MISSING:
        x_RD += tl.load(missing_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
    if HAS_NORM:
        bias_1D = tl.load(bias_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
        centred_RD = x_RD - bias_1D
        mean_R1 = tl.sum(centred_RD * centred_RD, axis=1, keep_dims=True) / D
        x_RD = x_RD * (tl.load(scale_ptr).to(tl.float32) / tl.sqrt(mean_R1))
    if HAS_BYPASS:
        x0_RD = tl.load(x0_ptr + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
        bypass_1D = tl.load(bypass_ptr + column_1D, mask=real_1D, other=0.0).to(tl.float32)
        x_RD = x0_RD + (x_RD - x0_RD) * bypass_1D
    tl.store(out_ptr + place_RD, x_RD.to(out_ptr.dtype.element_ty), mask=inside_RD)


def launch_bias_norm(x_XD: Tensor, bias_D: Tensor, scale: Tensor) -> Tensor:
    return _launch(x_XD, x_XD, norm=(bias_D, scale))


def launch_bypass(x0_XD: Tensor, x_XD: Tensor, scale_D: Tensor) -> Tensor:
    return _launch(x0_XD, x_XD, bypass_D=scale_D)


def launch_norm_bypass(
    x0_XD: Tensor,
    x_XD: Tensor,
    bias_D: Tensor,
    scale: Tensor,
    bypass_D: Tensor,
    missing_D: Tensor | None,
) -> Tensor:
    return _launch(x0_XD, x_XD, norm=(bias_D, scale), bypass_D=bypass_D, missing_D=missing_D)


@on_its_device
def _launch(
    x0_XD: Tensor,
    x_XD: Tensor,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    bypass_D: Tensor | None = None,
    missing_D: Tensor | None = None,
) -> Tensor:
    x0_XD, x_XD = x0_XD.contiguous(), x_XD.contiguous()
    out_XD = torch.empty_like(x0_XD)
    channels = x_XD.shape[-1]
    num_rows = x0_XD.numel() // channels
    # What is not read needs an address nonetheless.
    bias_D, scale = norm or (x_XD, x_XD)
    _norm_bypass[(triton.cdiv(num_rows, _ROWS),)](
        x0_XD, x_XD, bias_D, scale, x_XD if bypass_D is None else bypass_D,
        x_XD if missing_D is None else missing_D, out_XD, num_rows,
        D=channels, HAS_NORM=norm is not None, HAS_BYPASS=bypass_D is not None,
        HAS_MISSING=missing_D is not None, REPEAT=x0_XD.numel() // x_XD.numel(),
        BLOCK_D=next_power_of_two(channels), ROWS=_ROWS,
    )  # fmt: skip
    return out_XD
