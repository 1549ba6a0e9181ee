"""The Zipformer's operations against plain loops, and their kernels against the operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oasr_backend.cache.state import SlotTensor
from oasr_backend.kernels.average import average_frames
from oasr_backend.kernels.bias_norm import bias_norm, bypass, norm_bypass
from oasr_backend.kernels.chunk_attention import attend_window, chunk_attention_weights
from oasr_backend.kernels.chunk_convolution import chunk_convolution, taps_first
from oasr_backend.kernels.operands import ChunkConvolutionWeights, HeadSizes
from oasr_backend.kernels.roll import roll_rows, roll_rows_definition
from oasr_backend.kernels.swoosh import swoosh_l, swoosh_r, tanh_gate
from tests.interpreted import outcomes_of
from tests.reference import zipformer_kernels as reference

CHECKS = (
    "weights", "mixing", "convolution", "front_end", "conv_next", "norm", "average", "activations",
    "roll", "half",
)  # fmt: skip
#: Sums of a few dozen float64 products of size 10 at most.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def stored(*shape: int) -> SlotTensor:
    return SlotTensor(randn(5, *shape), torch.tensor([3, 0]))


@pytest.mark.parametrize(("frames", "cached"), [(1, 2), (2, 6), (4, 4), (5, 3)])
def test_weights_are_those_of_every_key_in_turn(frames: int, cached: int) -> None:
    heads, query, position = 2, 5, 3
    qkp, key = randn(2, frames, heads * (2 * query + position)), stored(cached, heads * query)
    table, seen = randn(cached + 2 * frames - 1, heads, position), [1, 100]
    sizes = HeadSizes(heads, query, position)
    got = chunk_attention_weights(qkp, key, table, torch.tensor(seen), sizes)
    widths = (heads * query, heads * query, heads * position)
    q, k, p = (x.view(2, frames, heads, -1) for x in qkp.split(widths, dim=2))
    keys = torch.cat((key.gather().view(2, cached, heads, query), k), dim=1)
    expected = reference.attention_weights(q, keys, p, table, seen)
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("heads", [1, 3])
def test_values_are_mixed_by_the_weights_of_their_head(heads: int) -> None:
    weights, values, x, gate = (
        randn(2, heads, 4, 9),
        stored(5, 12),
        randn(2, 4, 12),
        randn(2, 4, 12),
    )
    expected = reference.mixed(weights, torch.cat((values.gather(), x), dim=1))
    torch.testing.assert_close(attend_window(weights, values, x), expected, **CLOSE)
    torch.testing.assert_close(attend_window(weights, values, x, gate), expected * gate, **CLOSE)


@pytest.mark.parametrize(("frames", "kernel_size"), [(1, 3), (4, 15), (8, 7), (2, 31)])
def test_a_chunk_is_convolved_channel_by_channel(frames: int, kernel_size: int) -> None:
    channels, half = 3, kernel_size // 2
    gate, state = randn(2, frames, 2 * channels), stored(half, channels)
    weights = ChunkConvolutionWeights(
        randn(channels, half + 1), randn(channels), randn(channels, kernel_size),
        randn(channels), randn(frames, channels),
    )  # fmt: skip
    mixed, gated = chunk_convolution(gate, state, weights)
    torch.testing.assert_close(gated, gate[..., :3] * torch.sigmoid(gate[..., 3:]), **CLOSE)
    window = torch.cat((state.gather(), gated), dim=1)
    for row in range(2):
        for channel in range(channels):
            expected = reference.convolved(
                window[row, :, channel].tolist(),
                (weights.causal_Dk[channel].tolist(), float(weights.causal_bias_D[channel])),
                (weights.chunk_Dk[channel].tolist(), float(weights.chunk_bias_D[channel])),
                weights.scale_TD[:, channel].tolist(),
            )
            assert mixed[row, :, channel].tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)


def test_kernels_are_stored_taps_first_through_casts() -> None:
    kernel = randn(3, 7)
    stored_otherwise = taps_first(kernel).to(torch.float32)
    assert torch.equal(stored_otherwise, kernel.float())
    assert stored_otherwise.stride() == (1, 3)


def test_a_norm_divides_by_the_distance_from_its_bias() -> None:
    x0, x, bias, scale, share = randn(2, 7), randn(2, 7), randn(7), randn(1)[0], randn(7)
    rows = [reference.bias_norm(row, bias.tolist(), float(scale)) for row in x.tolist()]
    expected = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(bias_norm(x, bias, scale), expected, **CLOSE)
    torch.testing.assert_close(bypass(x0, x, share), x0 * (1 - share) + x * share, **CLOSE)
    both = norm_bypass(x0, x, bias, scale, share)
    torch.testing.assert_close(both, x0 * (1 - share) + expected * share, **CLOSE)
    missing = randn(7)
    both = norm_bypass(x0, x - missing, bias, scale, share, missing)
    torch.testing.assert_close(both, x0 * (1 - share) + expected * share, **CLOSE)


def test_a_bypass_repeats_frames_and_an_average_joins_them() -> None:
    x0, x, share = randn(2, 3, 7), randn(2, 1, 7), randn(7)
    expected = torch.stack([x0[:, place] + (x[:, 0] - x0[:, place]) * share for place in range(3)])
    torch.testing.assert_close(bypass(x0, x, share), expected.transpose(0, 1), **CLOSE)
    parts, frames = randn(3), randn(6, 5)
    joined = [sum(parts[i] * frames[3 * n + i] for i in range(3)) for n in range(2)]
    torch.testing.assert_close(average_frames(frames, parts), torch.stack(joined), **CLOSE)  # type: ignore[arg-type]


def test_activations_are_their_formulas_and_do_not_overflow() -> None:
    x = torch.tensor([-500.0, -20.0, -1.0, 0.0, 1.0, 4.0, 20.0, 500.0], dtype=torch.float64)
    for swoosh, shift, offset in ((swoosh_l, 4.0, 0.035), (swoosh_r, 1.0, 0.313261687)):
        expected = [reference.swoosh(value, shift, offset) for value in x.tolist()]
        # The softplus gives x itself from 20 on, which is off by exp(-20) at most.
        assert swoosh(x).tolist() == pytest.approx(expected, abs=3e-9)
        assert torch.isfinite(swoosh(torch.tensor([-6e4, 6e4], dtype=torch.float16))).all()
    gate, value = randn(2, 3, 5), randn(2, 3, 5)
    torch.testing.assert_close(tanh_gate(gate, value), value * torch.tanh(gate), **CLOSE)


@pytest.mark.parametrize("num_new", [1, 3, 4, 6])
def test_windows_move_on_where_they_are_stored(num_new: int) -> None:
    buffer, new = randn(2, 5, 4, 3), randn(2, 2, num_new, 3)
    before = buffer.clone()
    roll_rows(buffer, torch.tensor([3, 0]), new, 1, 2)
    for layer in range(2):
        for row, slot in enumerate((3, 0)):
            window = torch.cat((before[layer, slot], new[layer, row]))
            assert torch.equal(buffer[layer, slot], window[-4:])
    assert torch.equal(buffer[:, [1, 2, 4]], before[:, [1, 2, 4]])


@pytest.mark.parametrize(
    ("shape", "slot_axis", "axis"),
    [((7, 4, 6), 0, 1), ((7, 2, 4, 3), 0, 2), ((2, 7, 3, 4), 1, 3), ((7, 4, 0), 0, 1)],
)
@pytest.mark.parametrize("num_new", [0, 1, 4, 6])
def test_windows_of_any_layout_and_type_move_on_as_by_copies(
    shape: tuple[int, ...], slot_axis: int, axis: int, num_new: int
) -> None:
    slots, sizes = torch.tensor([4, 0, 6]), list(shape)
    sizes[slot_axis], sizes[axis] = len(slots), num_new
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        buffer, new = (10 * randn(*shape)).to(dtype), (10 * randn(*sizes)).to(dtype)
        expected = buffer.clone()
        roll_rows(buffer, slots, new, slot_axis, axis)
        roll_rows_definition(expected, slots, new, slot_axis, axis)
        assert torch.equal(buffer, expected)


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    return outcomes_of("tests.zipformer_kernel_checks", CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernel_gives_what_its_definition_gives(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == "equal"
