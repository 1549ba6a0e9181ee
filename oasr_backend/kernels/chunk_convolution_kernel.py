"""Triton kernel of `chunk_convolution`: one program a row and a few channels, a frame a register.

A thread has every frame that its channels need and all of their taps, so that each of them is read
once. That is written down frame by frame: the frames and taps are tuples of vectors over channels.

Shape letters: T frames of the chunk, L of the state, D channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import on_its_device
from oasr_backend.kernels.operands import (
    R_OFFSET,
    R_SHIFT,
    SLOPE,
    ChunkConvolutionWeights,
    SlotRows,
)
from oasr_backend.kernels.swoosh_kernel import swoosh

#: Frames and channels of a program, which is one warp: a channel a thread. A program runs through
#: its code once, so that few streams wait for the code more than for anything else.
_FRAMES, _CHANNELS, _WARPS = 8, 32, 1
#: Frames of the longest chunk whose parts have code of their own, and of a part of a longer one.
_FIXED_FRAMES = 16


@triton.jit
def _taps(kernel_ptr, channel_D, real_D, channel_size, tap_size, TAPS: tl.constexpr):
    """The kernel as a tuple of one vector a tap."""
    taps = ()
    for tap in tl.static_range(TAPS):
        place_D = channel_D * channel_size + tap * tap_size
        tap_D = tl.load(kernel_ptr + place_D, mask=real_D, other=0.0)
        taps += (tap_D.to(tl.float32),)  # type: ignore[assignment]
    return taps


@triton.jit
def _mix_frames(
    gate_ptr, state_ptr, causal_ptr, causal_bias_ptr, chunk_ptr, chunk_bias_ptr, scale_ptr,
    mixed_ptr, gated_ptr, channel_D, causal_channel, causal_tap, chunk_channel, chunk_tap, shift,
    SHIFT: tl.constexpr, OFFSET: tl.constexpr, SLOPE: tl.constexpr,
    T: tl.constexpr, L: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr,
    FRAMES: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Frames FIRST + shift and on. `FIXED`: where each lies is known when the kernel is made."""
    first = FIRST + shift
    real_D = channel_D < D
    zero_D = tl.zeros(channel_D.shape, dtype=tl.float32)
    # Frames first - L and on: `window` with the state before the chunk, `chunk` with zeros there.
    window, chunk = (), ()
    for place in tl.static_range(FRAMES + 2 * L):
        frame = first + place - L
        new_D, both_D = zero_D, zero_D
        if (not FIXED) or (FIRST + place >= L and FIRST + place < L + T):
            inside_D = real_D & (frame >= 0) & (frame < T)
            x_D = tl.load(gate_ptr + frame * (2 * D), mask=inside_D, other=0.0)
            shut_D = tl.load(gate_ptr + frame * (2 * D) + D, mask=inside_D, other=0.0)
            wide_D = x_D.to(tl.float32) / (1.0 + tl.exp(-shut_D.to(tl.float32)))
            stored_D = wide_D.to(gated_ptr.dtype.element_ty)
            if place >= L and place < L + FRAMES:
                tl.store(gated_ptr + frame * D, stored_D, mask=inside_D)
            new_D = stored_D.to(tl.float32)
            both_D = new_D
        if place < L and ((not FIXED) or FIRST + place < L):
            old_D = tl.load(state_ptr + (frame + L) * D, mask=real_D & (frame < 0), other=0.0)
            both_D = old_D.to(tl.float32) if FIXED else new_D + old_D.to(tl.float32)
        window += (both_D,)  # type: ignore[assignment]
        chunk += (new_D,)  # type: ignore[assignment]
    causal_taps = _taps(causal_ptr, channel_D, real_D, causal_channel, causal_tap, L + 1)
    chunk_taps = _taps(chunk_ptr, channel_D, real_D, chunk_channel, chunk_tap, 2 * L + 1)
    causal_bias_D = tl.load(causal_bias_ptr + channel_D, mask=real_D, other=0.0).to(tl.float32)
    chunk_bias_D = tl.load(chunk_bias_ptr + channel_D, mask=real_D, other=0.0).to(tl.float32)
    for time in tl.static_range(FRAMES):
        causal_D, chunk_D = causal_bias_D, chunk_bias_D
        for tap in tl.static_range(L + 1):
            causal_D = tl.fma(causal_taps[tap], window[time + tap], causal_D)
        for tap in tl.static_range(2 * L + 1):
            if (not FIXED) or (FIRST + time + tap >= L and FIRST + time + tap < L + T):
                chunk_D = tl.fma(chunk_taps[tap], chunk[time + tap], chunk_D)
        keep_D = real_D & (first + time < T)
        scale_D = tl.load(scale_ptr + (first + time) * D + channel_D, mask=keep_D, other=0.0)
        mixed_D = swoosh(causal_D + chunk_D * scale_D.to(tl.float32), SHIFT, OFFSET, SLOPE)
        mixed_D = mixed_D.to(mixed_ptr.dtype.element_ty)
        tl.store(mixed_ptr + (first + time) * D, mixed_D, mask=keep_D)


@triton.jit
def _chunk_convolution(
    gate_ptr, state_ptr, slot_ptr, causal_ptr, causal_bias_ptr, chunk_ptr, chunk_bias_ptr,
    scale_ptr, mixed_ptr, gated_ptr, slot_size, causal_channel, causal_tap, chunk_channel,
    chunk_tap, SHIFT: tl.constexpr, OFFSET: tl.constexpr, SLOPE: tl.constexpr,
    T: tl.constexpr, L: tl.constexpr, D: tl.constexpr, FRAMES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`PARTS`: of a chunk whose parts have code of their own; 0 where they share it."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    channel_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    gate_ptr += row * T * 2 * D + channel_D
    state_ptr += tl.load(slot_ptr + row) * slot_size + channel_D
    mixed_ptr += row * T * D + channel_D
    gated_ptr += row * T * D + channel_D
    if PARTS == 0:
        _mix_frames(
            gate_ptr, state_ptr, causal_ptr, causal_bias_ptr, chunk_ptr, chunk_bias_ptr,
            scale_ptr, mixed_ptr, gated_ptr, channel_D, causal_channel, causal_tap,
            chunk_channel, chunk_tap, part * FRAMES, SHIFT, OFFSET, SLOPE, T, L, D,
            0, FRAMES, False,
        )  # fmt: skip
    for fixed in tl.static_range(PARTS):
        if part == fixed:
            _mix_frames(
                gate_ptr, state_ptr, causal_ptr, causal_bias_ptr, chunk_ptr, chunk_bias_ptr,
                scale_ptr, mixed_ptr, gated_ptr, channel_D, causal_channel, causal_tap,
                chunk_channel, chunk_tap, 0, SHIFT, OFFSET, SLOPE, T, L, D,
                fixed * FRAMES, FRAMES, True,
            )  # fmt: skip


@on_its_device
def launch_chunk_convolution(
    gate_BTE: Tensor, state: SlotRows, weights: ChunkConvolutionWeights
) -> tuple[Tensor, Tensor]:
    gate_BTE = gate_BTE.contiguous()
    batch, num_frames, width = gate_BTE.shape
    channels = width // 2
    mixed_BTD = gate_BTE.new_empty((batch, num_frames, channels))
    gated_BTD = torch.empty_like(mixed_BTD)
    fixed = num_frames <= _FIXED_FRAMES
    frames = min(num_frames, _FRAMES if fixed else _FIXED_FRAMES)
    parts = triton.cdiv(num_frames, frames)
    grid = (triton.cdiv(channels, _CHANNELS), batch, parts)
    _chunk_convolution[grid](
        gate_BTE, state.buffer, state.slot_ids, weights.causal_Dk, weights.causal_bias_D,
        weights.chunk_Dk, weights.chunk_bias_D, weights.scale_TD.contiguous(),
        mixed_BTD, gated_BTD, state.buffer.stride(0),
        weights.causal_Dk.stride(0), weights.causal_Dk.stride(1),
        weights.chunk_Dk.stride(0), weights.chunk_Dk.stride(1),
        SHIFT=R_SHIFT, OFFSET=R_OFFSET, SLOPE=SLOPE,
        T=num_frames, L=weights.state_frames, D=channels, FRAMES=frames,
        PARTS=parts if fixed else 0, BLOCK_D=_CHANNELS, num_warps=_WARPS,
    )  # fmt: skip
    return mixed_BTD, gated_BTD
