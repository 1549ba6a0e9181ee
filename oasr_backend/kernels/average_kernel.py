"""Triton kernel of `average_frames`. E elements of one program, D channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import on_its_device

_ELEMENTS = 512


@triton.jit
def _average_frames(
    x_ptr, share_ptr, out_ptr, num_elements,
    D: tl.constexpr, RATE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    place_E = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside_E = place_E < num_elements
    x_ptr += place_E // D * (RATE * D) + place_E % D
    sum_E = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for frame in tl.static_range(RATE):
        x_E = tl.load(x_ptr + frame * D, mask=inside_E, other=0.0).to(tl.float32)
        sum_E += x_E * tl.load(share_ptr + frame).to(tl.float32)
    tl.store(out_ptr + place_E, sum_E.to(out_ptr.dtype.element_ty), mask=inside_E)


@on_its_device
def launch_average_frames(x_MD: Tensor, share_s: Tensor) -> Tensor:
    x_MD = x_MD.contiguous()
    rate, channels = share_s.shape[0], x_MD.shape[1]
    out_ND = x_MD.new_empty((x_MD.shape[0] // rate, channels))
    _average_frames[(triton.cdiv(out_ND.numel(), _ELEMENTS),)](
        x_MD, share_s, out_ND, out_ND.numel(), D=channels, RATE=rate, BLOCK_E=_ELEMENTS
    )
    return out_ND
