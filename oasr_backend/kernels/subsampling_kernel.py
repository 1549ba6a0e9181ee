"""Triton kernel of the subsampling's first convolution: one input channel, many output channels.

It is bound by writing its output, so bias and ReLU ride along.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, nn

from oasr_backend.kernels.launch import next_power_of_two, on_its_device

_CHANNELS = 128


@triton.jit
def _first_convolution(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    H: tl.constexpr, W: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, C: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stream, y = row // Y, row % Y
    x_X1 = tl.arange(0, BLOCK_X)[:, None]
    channel_1C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    real_1C = channel_1C < C
    bias_1C = tl.load(bias_ptr + channel_1C, mask=real_1C, other=0.0).to(tl.float32)
    sum_XC = tl.zeros((BLOCK_X, BLOCK_C), dtype=tl.float32) + bias_1C
    window_ptr = x_ptr + stream * H * W + y * STRIDE * W
    for tap in tl.static_range(SIZE * SIZE):
        offset_X1 = (tap // SIZE) * W + x_X1 * STRIDE + tap % SIZE
        value_X1 = tl.load(window_ptr + offset_X1, mask=x_X1 < X, other=0.0).to(tl.float32)
        weight_1C = tl.load(weight_ptr + channel_1C * (SIZE * SIZE) + tap, mask=real_1C, other=0.0)
        sum_XC += value_X1 * weight_1C.to(tl.float32)
    out_XC = tl.maximum(sum_XC, 0.0).to(out_ptr.dtype.element_ty)
    place_XC = (row * X + x_X1) * C + channel_1C
    tl.store(out_ptr + place_XC, out_XC, mask=(x_X1 < X) & real_1C)


@on_its_device
def launch_first_convolution(x_B1HW: Tensor, convolution: nn.Conv2d) -> Tensor:
    batch, _, height, width = x_B1HW.shape
    size, stride = convolution.kernel_size[0], convolution.stride[0]
    out_height, out_width = (height - size) // stride + 1, (width - size) // stride + 1
    channels = convolution.out_channels
    out_BYXC = x_B1HW.new_empty((batch, out_height, out_width, channels))
    _first_convolution[(batch * out_height, triton.cdiv(channels, _CHANNELS))](
        x_B1HW.contiguous(), convolution.weight.contiguous(), convolution.bias, out_BYXC,
        H=height, W=width, Y=out_height, X=out_width, C=channels, SIZE=size, STRIDE=stride,
        BLOCK_X=next_power_of_two(out_width), BLOCK_C=_CHANNELS,
    )  # fmt: skip
    return out_BYXC.permute(0, 3, 1, 2)
