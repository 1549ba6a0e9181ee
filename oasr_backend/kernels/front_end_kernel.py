"""Triton kernels of `convolution_swoosh` and `conv_next`, channels last.

A convolution is a product: the columns of one line of an output's window lie side by side with
their channels. Tiles depend on shapes and types alone, so that a row's result does too.

Shape letters: P places (row, frame, column) of an output, C channels, K inner columns and channels
of a line, U hidden channels; sizes H, W frames and columns of the input, Y, X of the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from oasr_backend.kernels.launch import next_power_of_two, on_its_device
from oasr_backend.kernels.operands import (
    L_OFFSET,
    L_SHIFT,
    R_OFFSET,
    R_SHIFT,
    SLOPE,
    ConvNeXtWeights,
    SlotRows,
)
from oasr_backend.kernels.swoosh_kernel import swoosh

#: Places of a program with one input channel; outputs of a thread's registers are few.
_FIRST_PLACES, _FIRST_CHANNELS = 128, 8
#: Places, inner columns and output channels of a product; float32 has no tensor cores to feed.
_PLACES, _INNER, _CHANNELS = 64, 32, 128
_WIDE_PLACES, _WIDE_CHANNELS = 32, 64
#: Columns and channels of a depthwise program, which is one warp: two channels a thread.
_COLUMNS, _DEPTHWISE_CHANNELS = 8, 64
#: Places, hidden channels and warps of the two pointwise layers, by whether they are 16 bits wide.
_POINTWISE = {True: (128, 64, 8), False: (32, 16, 4)}


@triton.jit
def _first_convolution_swoosh(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_places,
    H: tl.constexpr, W: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, C: tl.constexpr,
    SIZE: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, PADDING: tl.constexpr,
    SHIFT: tl.constexpr, OFFSET: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    place_P1 = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    channel_1C = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    real_P1, real_1C = place_P1 < num_places, channel_1C < C
    line_P1 = place_P1 // X
    column_P1 = (place_P1 % X) * STRIDE_X - PADDING
    window_P1 = ((line_P1 // Y).to(tl.int64) * H + (line_P1 % Y) * STRIDE_Y) * W + column_P1
    bias_1C = tl.load(bias_ptr + channel_1C, mask=real_1C, other=0.0).to(tl.float32)
    sum_PC = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32) + bias_1C
    for tap in tl.static_range(SIZE * SIZE):
        inside_P1 = (column_P1 + tap % SIZE >= 0) & (column_P1 + tap % SIZE < W) & real_P1
        place = (tap // SIZE) * W + tap % SIZE
        x_P1 = tl.load(x_ptr + window_P1 + place, mask=inside_P1, other=0.0).to(tl.float32)
        weight_1C = tl.load(weight_ptr + channel_1C * (SIZE * SIZE) + tap, mask=real_1C, other=0.0)
        sum_PC += x_P1 * weight_1C.to(tl.float32)
    out_PC = swoosh(sum_PC, SHIFT, OFFSET, SLOPE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place_P1.to(tl.int64) * C + channel_1C, out_PC, mask=real_P1 & real_1C)


@triton.jit
def _convolution_swoosh(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_places,
    H: tl.constexpr, W: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, C: tl.constexpr,
    IN: tl.constexpr, SIZE: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    SHIFT: tl.constexpr, OFFSET: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    INNER: tl.constexpr = SIZE * IN
    PARTS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    place_P1 = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    channel_1C = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    real_P1, real_1C = place_P1 < num_places, channel_1C < C
    line_P1 = place_P1 // X
    frame_P1 = (line_P1 // Y).to(tl.int64) * H + (line_P1 % Y) * STRIDE_Y
    window_P1 = (frame_P1 * W + (place_P1 % X) * STRIDE_X) * IN
    inner_K = tl.arange(0, BLOCK_K)
    sum_PC = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for part in range(SIZE * PARTS):
        line, first = part // PARTS, (part % PARTS) * BLOCK_K
        in_1K, in_K1 = (first + inner_K)[None, :], (first + inner_K)[:, None]
        x_PK = tl.load(
            x_ptr + window_P1 + line * (W * IN) + in_1K, mask=real_P1 & (in_1K < INNER), other=0.0
        )
        weight_KC = tl.load(
            weight_ptr + (line * INNER + in_K1) * C + channel_1C,
            mask=(in_K1 < INNER) & real_1C,
            other=0.0,
        )
        sum_PC = tl.dot(x_PK, weight_KC, sum_PC, input_precision="ieee")
    bias_1C = tl.load(bias_ptr + channel_1C, mask=real_1C, other=0.0).to(tl.float32)
    out_PC = swoosh(sum_PC + bias_1C, SHIFT, OFFSET, SLOPE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place_P1.to(tl.int64) * C + channel_1C, out_PC, mask=real_P1 & real_1C)


@triton.jit
def _depthwise(
    x_ptr, state_ptr, slot_ptr, taps_ptr, bias_ptr, out_ptr, slot_size, tap_channel, tap_size,
    T: tl.constexpr, W: tl.constexpr, C: tl.constexpr, REACH: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = 2 * REACH + 1
    BLOCKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    PARTS: tl.constexpr = (W + COLUMNS - 1) // COLUMNS
    # Neighbours share what they read; the other axes of a grid are too short for the lines.
    part, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    line, first = part // PARTS, (part % PARTS) * COLUMNS - REACH
    row, time = (line // T).to(tl.int64), line % T
    channel_C = block * BLOCK_C + tl.arange(0, BLOCK_C)
    real_C = channel_C < C
    state_ptr += tl.load(slot_ptr + row) * slot_size + channel_C * (REACH * W)
    x_ptr += row * ((T + REACH) * W * C) + channel_C
    bias_C = tl.load(bias_ptr + channel_C, mask=real_C, other=0.0).to(tl.float32)
    sums = ()
    for _ in tl.static_range(COLUMNS):
        sums += (bias_C,)  # type: ignore[assignment]
    for tap_row in range(SIZE):
        frame = time + tap_row - REACH
        taps = ()
        for tap in tl.static_range(SIZE):
            place_C = channel_C * tap_channel + (tap_row * SIZE + tap) * tap_size
            tap_C = tl.load(taps_ptr + place_C, mask=real_C, other=0.0)
            taps += (tap_C.to(tl.float32),)  # type: ignore[assignment]
        window = ()
        for place in tl.static_range(COLUMNS + 2 * REACH):
            column = first + place
            inside_C = real_C & (column >= 0) & (column < W)
            x_C = tl.load(
                x_ptr + (frame * W + column) * C, mask=inside_C & (frame >= 0), other=0.0
            ).to(tl.float32)
            # Frames before the chunk: at most one of the two is there.
            old_C = tl.load(
                state_ptr + (frame + REACH) * W + column, mask=inside_C & (frame < 0), other=0.0
            )
            window += (x_C + old_C.to(tl.float32),)  # type: ignore[assignment]
        new_sums = ()
        for place in tl.static_range(COLUMNS):
            sum_C = sums[place]  # type: ignore[var-annotated]
            for tap in tl.static_range(SIZE):
                sum_C = tl.fma(taps[tap], window[place + tap], sum_C)
            new_sums += (sum_C,)  # type: ignore[assignment]
        sums = new_sums
    out_ptr += (line.to(tl.int64) * W + first + REACH) * C + channel_C
    for place in tl.static_range(COLUMNS):
        out_C = sums[place].to(out_ptr.dtype.element_ty)  # type: ignore[var-annotated]
        tl.store(out_ptr + place * C, out_C, mask=real_C & (first + REACH + place < W))


@triton.jit
def _pointwise(
    mixed_ptr, x_ptr, widen_ptr, widen_bias_ptr, narrow_ptr, narrow_bias_ptr, out_ptr, num_places,
    PLACES: tl.constexpr, ALL_PLACES: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    SHIFT: tl.constexpr, OFFSET: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    place_P1 = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    channel_C, hidden_U = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_U)
    channel_1C, channel_C1 = channel_C[None, :], channel_C[:, None]
    inside_PC = (place_P1 < num_places) & (channel_1C < C)
    at_PC = place_P1.to(tl.int64) * C + channel_1C
    mixed_PC = tl.load(mixed_ptr + at_PC, mask=inside_PC, other=0.0)
    sum_PC = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for first in range(0, U, BLOCK_U):
        unit_1U, unit_U1 = (first + hidden_U)[None, :], (first + hidden_U)[:, None]
        widen_CU = tl.load(
            widen_ptr + unit_1U * C + channel_C1, mask=(channel_C1 < C) & (unit_1U < U), other=0.0
        )
        bias_1U = tl.load(widen_bias_ptr + unit_1U, mask=unit_1U < U, other=0.0).to(tl.float32)
        wide_PU = tl.dot(mixed_PC, widen_CU, input_precision="ieee") + bias_1U
        wide_PU = swoosh(wide_PU, SHIFT, OFFSET, SLOPE).to(mixed_PC.dtype)
        # Units past the last one are no zeros, but their weights are.
        narrow_UC = tl.load(
            narrow_ptr + channel_1C * U + unit_U1, mask=(channel_1C < C) & (unit_U1 < U), other=0.0
        )
        sum_PC = tl.dot(wide_PU, narrow_UC, sum_PC, input_precision="ieee")
    bias_1C = tl.load(narrow_bias_ptr + channel_1C, mask=channel_1C < C, other=0.0).to(tl.float32)
    row_P1 = (place_P1 // PLACES).to(tl.int64)
    x_at_PC = (row_P1 * ALL_PLACES + place_P1 % PLACES) * C + channel_1C
    x_PC = tl.load(x_ptr + x_at_PC, mask=inside_PC, other=0.0).to(tl.float32)
    out_PC = (x_PC + sum_PC + bias_1C).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at_PC, out_PC, mask=inside_PC)


@on_its_device
def launch_first_convolution(x_B1HW: Tensor, convolution: nn.Conv2d) -> Tensor:
    x_B1HW = x_B1HW.contiguous()
    out_BYXC = _output_of(x_B1HW, convolution)
    _, lines, columns, channels = out_BYXC.shape
    num_places = out_BYXC.numel() // channels
    grid = (triton.cdiv(num_places, _FIRST_PLACES), triton.cdiv(channels, _FIRST_CHANNELS))
    _first_convolution_swoosh[grid](
        x_B1HW, convolution.weight.contiguous(), convolution.bias, out_BYXC, num_places,
        H=x_B1HW.shape[2], W=x_B1HW.shape[3], Y=lines, X=columns, C=channels,
        SIZE=convolution.kernel_size[0], STRIDE_Y=convolution.stride[0],
        STRIDE_X=convolution.stride[1], PADDING=int(convolution.padding[1]),
        SHIFT=R_SHIFT, OFFSET=R_OFFSET, SLOPE=SLOPE,
        BLOCK_P=_FIRST_PLACES, BLOCK_C=_FIRST_CHANNELS,
    )  # fmt: skip
    return out_BYXC.permute(0, 3, 1, 2)


@on_its_device
def launch_convolution(x_BCHW: Tensor, convolution: nn.Conv2d, taps_KC: Tensor) -> Tensor:
    x_BHWC = x_BCHW.permute(0, 2, 3, 1).contiguous()
    out_BYXC = _output_of(x_BCHW, convolution)
    _, lines, columns, channels = out_BYXC.shape
    num_places = out_BYXC.numel() // channels
    wide = x_BHWC.dtype == torch.float32
    places, most = (_WIDE_PLACES, _WIDE_CHANNELS) if wide else (_PLACES, _CHANNELS)
    block = min(next_power_of_two(channels, least=16), most)
    _convolution_swoosh[triton.cdiv(num_places, places), triton.cdiv(channels, block)](
        x_BHWC, taps_KC, convolution.bias, out_BYXC, num_places,
        H=x_BHWC.shape[1], W=x_BHWC.shape[2], Y=lines, X=columns, C=channels,
        IN=x_BHWC.shape[3], SIZE=convolution.kernel_size[0], STRIDE_Y=convolution.stride[0],
        STRIDE_X=convolution.stride[1], SHIFT=R_SHIFT, OFFSET=R_OFFSET, SLOPE=SLOPE,
        BLOCK_P=places, BLOCK_K=_INNER, BLOCK_C=block,
    )  # fmt: skip
    return out_BYXC.permute(0, 3, 1, 2)


def _output_of(x_BCHW: Tensor, convolution: nn.Conv2d) -> Tensor:
    size, (stride_y, stride_x) = convolution.kernel_size[0], convolution.stride
    batch, _, height, width = x_BCHW.shape
    width += 2 * int(convolution.padding[1])
    lines, columns = (height - size) // stride_y + 1, (width - size) // stride_x + 1
    return x_BCHW.new_empty((batch, lines, columns, convolution.out_channels))


@on_its_device
def launch_depthwise(x_BCHM: Tensor, before: SlotRows, weights: ConvNeXtWeights) -> Tensor:
    """(B, T, M, C), the kernel's order."""
    x_BHMC, reach = x_BCHM.permute(0, 2, 3, 1).contiguous(), weights.reach
    batch, height, columns, channels = x_BHMC.shape
    frames = height - reach
    mixed_BTMC = x_BHMC.new_empty((batch, frames, columns, channels))
    width = triton.cdiv(columns, triton.cdiv(columns, _COLUMNS))
    parts, blocks = triton.cdiv(columns, width), triton.cdiv(channels, _DEPTHWISE_CHANNELS)
    grid = (batch * frames * parts * blocks,)
    _depthwise[grid](
        x_BHMC, before.buffer, before.slot_ids, weights.taps_Ck, weights.depthwise.bias,
        mixed_BTMC, before.buffer.stride(0), weights.taps_Ck.stride(0), weights.taps_Ck.stride(1),
        T=frames, W=columns, C=channels, REACH=reach,
        COLUMNS=width, BLOCK_C=_DEPTHWISE_CHANNELS, num_warps=1,
    )  # fmt: skip
    return mixed_BTMC


@on_its_device
def launch_pointwise(mixed_BTMC: Tensor, x_BCHM: Tensor, weights: ConvNeXtWeights) -> Tensor:
    x_BHMC = x_BCHM.permute(0, 2, 3, 1).contiguous()
    out_BTMC = torch.empty_like(mixed_BTMC)
    _, frames, columns, channels = mixed_BTMC.shape
    num_places = mixed_BTMC.numel() // channels
    places, units, warps = _POINTWISE[mixed_BTMC.dtype != torch.float32]
    _pointwise[(triton.cdiv(num_places, places),)](
        mixed_BTMC, x_BHMC, weights.widen.weight.contiguous(), weights.widen.bias,
        weights.narrow.weight.contiguous(), weights.narrow.bias, out_BTMC, num_places,
        PLACES=frames * columns, ALL_PLACES=x_BHMC.shape[1] * columns, C=channels,
        U=weights.widen.out_channels, SHIFT=L_SHIFT, OFFSET=L_OFFSET, SLOPE=SLOPE,
        BLOCK_P=places, BLOCK_C=next_power_of_two(channels, least=16), BLOCK_U=units,
        num_warps=warps,
    )  # fmt: skip
    return out_BTMC.permute(0, 3, 1, 2)
