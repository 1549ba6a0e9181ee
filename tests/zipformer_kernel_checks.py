"""Compares the Zipformer's kernels with their definitions, interpreted or on a GPU.

TRITON_INTERPRET=1 python -m tests.zipformer_kernel_checks weights mixing ...

Slots that no row has hold NaN, and so do cached keys that no row may see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from oasr_backend.cache.state import SlotTensor
from oasr_backend.kernels import ChunkConvolutionWeights, HeadSizes
from oasr_backend.kernels.average import average_frames, average_frames_definition
from oasr_backend.kernels.bias_norm import (
    bias_norm,
    bias_norm_definition,
    bypass,
    bypass_definition,
    norm_bypass,
    norm_bypass_definition,
)
from oasr_backend.kernels.chunk_attention import (
    attend_window,
    attend_window_definition,
    chunk_attention_weights,
    chunk_attention_weights_definition,
)
from oasr_backend.kernels.chunk_convolution import (
    chunk_convolution,
    chunk_convolution_definition,
    taps_first,
)
from oasr_backend.kernels.front_end import (
    ConvNeXtWeights,
    conv_next,
    conv_next_definition,
    convolution_swoosh,
    convolution_swoosh_definition,
    inner_channels_first,
)
from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.roll import roll_rows, roll_rows_definition
from oasr_backend.kernels.swoosh import (
    L_OFFSET,
    L_SHIFT,
    R_OFFSET,
    R_SHIFT,
    swoosh_definition,
    swoosh_l,
    swoosh_r,
    tanh_gate,
    tanh_gate_definition,
)
from tests.rounding import gamma

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Sums of at most 80 products, whose magnitudes add up to 40 where they count, on both sides.
TOLERANCE = 2 * gamma(80) * 40.0
#: Of float16, whose results are rounded once more and whose inputs are the same.
HALF_TOLERANCE = 2.0**-11 * 40.0
SLOTS = (4, 0, 6)
#: Frames of the chunk, cached frames, heads, query and position width; the last is in two parts.
SHAPES = (
    (16, 32, 2, 32, 4),
    (4, 36, 4, 24, 3),
    (2, 16, 2, 32, 4),
    (1, 8, 2, 16, 4),
    (40, 40, 1, 8, 4),
)

Pairs = Iterator[tuple[Tensor, Tensor]]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def stored(*shape: int, dtype: torch.dtype = torch.float32) -> SlotTensor:
    buffer = torch.full((7, *shape), float("nan"), device=DEVICE, dtype=dtype)
    for slot in SLOTS:
        buffer[slot] = randn(*shape)
    return SlotTensor(buffer, torch.tensor(SLOTS, device=DEVICE))


def first_row(rows: SlotTensor) -> SlotTensor:
    return SlotTensor(rows.buffer, rows.slot_ids[:1])


def _weights(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Pairs:
    for frames, cached, heads, query, position in shapes:
        qkp = randn(3, frames, heads * (2 * query + position)).to(dtype)
        key = stored(cached, heads * query, dtype=dtype)
        key.buffer[SLOTS[0]] = float("nan")
        key.buffer[SLOTS[1], : cached - 3] = float("nan")
        table = randn(cached + 2 * frames - 1, heads, position).to(dtype)
        seen = torch.tensor([0, 3, 1000], device=DEVICE)
        sizes = HeadSizes(heads, query, position)
        got = chunk_attention_weights(qkp, key, table, seen, sizes)
        rest = (seen.int(), sizes)
        yield got, chunk_attention_weights_definition(qkp, key, table, *rest)
        # By the table's strides, and a row without the others.
        spread = table.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        alone = chunk_attention_weights(qkp[:1], first_row(key), spread, seen[:1], sizes)
        yield exactly(alone[0], got[0])


def check_weights() -> Pairs:
    yield from _weights(torch.float32)


def check_mixing() -> Pairs:
    for frames, cached, heads, _, _ in SHAPES[1:]:
        weights = randn(3, heads, frames, cached + frames).softmax(dim=-1)
        for part, width in ((weights, heads * 12), (weights[:, :1], 147)):
            values, three = stored(cached, width), randn(3, frames, 3 * width)
            x, gate = three[..., :width], three[..., 2 * width :]
            for y in (None, gate):
                got = attend_window(part, values, x, y)
                yield got, attend_window_definition(part, values, x, y)
                alone = (x[:1], None if y is None else y[:1])
                yield exactly(attend_window(part[:1], first_row(values), *alone)[0], got[0])


def check_convolution() -> Pairs:
    # Chunks shorter and longer than the state, or in several parts; taps stored either way.
    for frames, kernel_size, channels in (
        (4, 15, 36),
        (8, 7, 6),
        (2, 31, 80),
        (1, 3, 4),
        (11, 7, 5),
        (20, 9, 5),
    ):
        half = kernel_size // 2
        weights = ChunkConvolutionWeights(
            randn(half + 1, channels).t(), randn(channels),
            randn(channels, kernel_size), randn(channels), randn(frames, channels),
        )  # fmt: skip
        gate, state = randn(3, frames, 2 * channels), stored(half, channels)
        got = chunk_convolution(gate, state, weights)
        yield from zip(got, chunk_convolution_definition(gate, state, weights), strict=True)
        alone = chunk_convolution(gate[:1], first_row(state), weights)
        yield exactly(alone[0][0], got[0][0])


def check_front_end() -> Pairs:
    """From one channel on, of sizes that fill no tile or more than one."""
    x = randn(3, 1, 11, 15)
    for convolution in (
        nn.Conv2d(1, 9, 3, padding=(0, 1), device=DEVICE),
        nn.Conv2d(9, 5, 3, stride=2, device=DEVICE),
        nn.Conv2d(5, 70, 3, stride=(1, 2), device=DEVICE),
    ):
        taps = inner_channels_first(convolution)
        got = convolution_swoosh(x, convolution, taps)
        yield got, convolution_swoosh_definition(x, convolution)
        yield exactly(convolution_swoosh(x[:1], convolution, taps)[0], got[0])
        x = got


def check_conv_next() -> Pairs:
    for channels, frames, columns, reach in ((70, 4, 9, 3), (5, 2, 3, 3), (16, 5, 18, 1)):
        size = 2 * reach + 1
        depthwise = nn.Conv2d(
            channels, channels, size, groups=channels, padding=(0, reach), device=DEVICE
        )
        weights = ConvNeXtWeights(
            depthwise,
            taps_first(depthwise.weight.flatten(1)),
            nn.Conv2d(channels, 3 * channels, 1, device=DEVICE),
            nn.Conv2d(3 * channels, channels, 1, device=DEVICE),
        )
        x, before = randn(3, channels, frames + reach, columns), stored(channels, reach, columns)
        got = conv_next(x, before, weights)
        yield got, conv_next_definition(x, before.gather(), weights)
        yield exactly(conv_next(x[:1], first_row(before), weights)[0], got[0])


def check_norm() -> Pairs:
    x0, x, bias, scale, share = randn(3, 5, 36), randn(3, 5, 36), randn(36), randn(1)[0], randn(36)
    yield bias_norm(x, bias, scale), bias_norm_definition(x, bias, scale)
    yield bypass(x0, x, share), bypass_definition(x0, x, share)
    both = norm_bypass(x0, x, bias, scale, share)
    yield both, norm_bypass_definition(x0, x, bias, scale, share)
    yield exactly(norm_bypass(x0[:1], x[:1], bias, scale, share)[0], both[0])
    missing = randn(36)
    both = norm_bypass(x0, x, bias, scale, share, missing)
    yield both, norm_bypass_definition(x0, x, bias, scale, share, missing)
    yield bypass(x0, x[:, :1], share), bypass_definition(x0, x[:, :1], share)


def check_average() -> Pairs:
    for rate in (2, 3):
        x, share = randn(6, 300), randn(rate).softmax(dim=0)
        yield average_frames(x, share), average_frames_definition(x, share)


def check_activations() -> Pairs:
    x, three = randn(3, 5, 36) * 30.0, randn(3, 5, 108) * 3.0
    for swoosh, shift, offset in ((swoosh_l, L_SHIFT, L_OFFSET), (swoosh_r, R_SHIFT, R_OFFSET)):
        yield swoosh(x), swoosh_definition(x, shift, offset)
    gate, value = three[..., :36], three[..., 36:72]
    yield tanh_gate(gate, value), tanh_gate_definition(gate, value)
    yield tanh_gate(gate[:, 1:3], value[:, 1:3]), tanh_gate_definition(gate[:, 1:3], value[:, 1:3])


def check_roll() -> Pairs:
    for shape, slot_axis, axis in (
        ((2, 7, 8, 36), 1, 2),
        ((7, 2, 20, 5), 0, 2),
        ((7, 3, 200), 0, 1),
    ):
        for num_new in (1, 5, shape[axis], shape[axis] + 3):
            new_shape = list(shape)
            new_shape[slot_axis], new_shape[axis] = len(SLOTS), num_new
            got, new = randn(*shape), randn(*new_shape)
            expected = got.clone()
            slots = torch.tensor(SLOTS, device=DEVICE)
            roll_rows(got, slots, new, slot_axis, axis)
            roll_rows_definition(expected, slots, new, slot_axis, axis)
            yield exactly(got, expected)


def check_half() -> Pairs:
    """The widest and the least type that is served differ by rounding alone."""
    yield from _halves(_weights(torch.float16, SHAPES[1:3]))
    gate, state = randn(3, 4, 20).half(), stored(7, 10, dtype=torch.float16)
    kernels = (randn(10, 8), randn(10), randn(10, 15), randn(10), randn(4, 10))
    got = chunk_convolution(gate, state, ChunkConvolutionWeights(*(w.half() for w in kernels)))
    wide = SlotTensor(state.buffer.float(), state.slot_ids)
    weights = ChunkConvolutionWeights(*(w.half().float() for w in kernels))
    expected = chunk_convolution_definition(gate.float(), wide, weights)
    yield from _halves(zip(got, expected, strict=True))
    part, values = randn(3, 2, 4, 12).softmax(dim=-1).half(), stored(8, 24, dtype=torch.float16)
    x = randn(3, 4, 24).half()
    wide = SlotTensor(values.buffer.float(), values.slot_ids)
    expected_mixed = attend_window_definition(part.float(), wide, x.float())
    yield from _halves([(attend_window(part, values, x), expected_mixed)])


def _halves(pairs: Iterator[tuple[Tensor, Tensor]] | list[tuple[Tensor, Tensor]]) -> Pairs:
    """Differences as a share of what float16 may lose, in units of the tolerance of float32."""
    for got, expected in pairs:
        assert got.dtype in (torch.float16, torch.float32)
        difference = (got.float() - expected.float()) * (TOLERANCE / HALF_TOLERANCE)
        yield difference, torch.zeros_like(difference)


def exactly(got: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """A pair that differs by far more than rounding unless it differs by nothing."""
    return (got != expected).float(), torch.zeros_like(got, dtype=torch.float32)


def main() -> None:
    torch.manual_seed(0)
    assert use_kernel(randn(1)), "no kernel would run: set TRITON_INTERPRET=1 or use a GPU"
    with torch.inference_mode():
        for name in sys.argv[1:]:
            check: Callable[[], Pairs] = globals()[f"check_{name}"]
            worst = max(
                float((got - expected).abs().nan_to_num(torch.inf).max())
                for got, expected in check()
            )
            sys.stdout.write(f"{name}: {'equal' if worst < TOLERANCE else worst}\n")


if __name__ == "__main__":
    main()
