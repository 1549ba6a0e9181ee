"""Triton kernel of the filterbank's framing: DC removal, pre-emphasis, window, zero padding.

One program a frame and one pass over its samples, where separate operations take six.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import on_its_device


@triton.jit
def _cut_frames(
    samples_ptr, window_ptr, out_ptr, num_samples, num_frames, preemphasis,
    LENGTH: tl.constexpr, SHIFT: tl.constexpr, REMOVE_DC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    frame_ptr = samples_ptr + (row // num_frames) * num_samples + (row % num_frames) * SHIFT
    sample_N = tl.arange(0, BLOCK_N)
    inside_N = sample_N < LENGTH
    value_N = tl.load(frame_ptr + sample_N, mask=inside_N, other=0.0)
    # The first sample of a frame is its own predecessor.
    before_N = tl.load(frame_ptr + tl.maximum(sample_N - 1, 0), mask=inside_N, other=0.0)
    if REMOVE_DC:
        mean = tl.sum(value_N, axis=0) / LENGTH
        value_N -= mean
        before_N -= mean
    window_N = tl.load(window_ptr + sample_N, mask=inside_N, other=0.0)
    out_N = tl.where(inside_N, (value_N - preemphasis * before_N) * window_N, 0.0)
    tl.store(out_ptr + row * BLOCK_N + sample_N, out_N)


@on_its_device
def launch_cut_frames(
    samples_BS: Tensor, window_N: Tensor, *, shift: int, fft_size: int, preemphasis: float,
    remove_dc: bool,
) -> Tensor:  # fmt: skip
    """(B, T, fft_size) float32 frames, zero past the window's length."""
    samples_BS = samples_BS.contiguous()
    batch, num_samples = samples_BS.shape
    length = window_N.shape[0]
    num_frames = (num_samples - length) // shift + 1
    out_BTN = torch.empty((batch, num_frames, fft_size), device=samples_BS.device)
    _cut_frames[(batch * num_frames,)](
        samples_BS, window_N, out_BTN, num_samples, num_frames, preemphasis,
        LENGTH=length, SHIFT=shift, REMOVE_DC=remove_dc, BLOCK_N=fft_size,
    )  # fmt: skip
    return out_BTN
