"""Compares kernels with their definitions on random inputs, interpreted or on a GPU.

TRITON_INTERPRET=1 python -m tests.kernel_checks norm attention ...
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from oasr_backend.cache.paged_kv import PagedKVCache, PagedLayout, PagedRows
from oasr_backend.features import FbankConfig, LogMelFilterbank
from oasr_backend.kernels import AttentionTables, ConvolutionWeights
from oasr_backend.kernels.attention import paged_rel_attention, paged_rel_attention_definition
from oasr_backend.kernels.convolution import (
    gated_causal_convolution,
    gated_causal_convolution_definition,
)
from oasr_backend.kernels.ctc import best_tokens, best_tokens_definition
from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.norm import add_layer_norm, add_layer_norm_definition
from oasr_backend.kernels.subsampling import convolution_relu, convolution_relu_definition
from tests.rounding import gamma

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Sums of at most 48 products, whose magnitudes add up to 4 where they count, on both sides.
TOLERANCE = 2 * gamma(48) * 4.0


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def random_norm(dim: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(dim, device=DEVICE)
    nn.init.normal_(norm.weight, 1.0, 0.2)
    nn.init.normal_(norm.bias)
    return norm


def check_norm() -> list[tuple[Tensor, Tensor]]:
    x, change, norm = randn(3, 5, 36), randn(3, 5, 36), random_norm(36)
    got, expected = add_layer_norm(x, change, norm), add_layer_norm_definition(x, change, norm)
    return list(zip(got, expected, strict=True))


def check_outer_norm() -> list[tuple[Tensor, Tensor]]:
    x, change, norm, outer = randn(2, 3, 48), randn(2, 3, 48), random_norm(48), random_norm(48)
    got = add_layer_norm(x, change, norm, outer)
    return list(zip(got, add_layer_norm_definition(x, change, norm, outer), strict=True))


def check_convolution() -> list[tuple[Tensor, Tensor]]:
    pairs = []
    # The state is longer than the chunk, or shorter; the module has a norm, or has none.
    for num_frames, kernel_size, norm in ((4, 15, None), (16, 7, random_norm(36)), (5, 31, None)):
        depthwise = nn.Conv2d(36, 36, (1, kernel_size), groups=36, device=DEVICE)
        weights = ConvolutionWeights(randn(36), depthwise, norm)
        gate, state = randn(3, num_frames, 72), randn(3, kernel_size - 1, 36)
        got = gated_causal_convolution(gate, state, weights)
        expected = gated_causal_convolution_definition(gate, state, weights)
        pairs += list(zip(got, expected, strict=True))
    return pairs


def check_attention() -> list[tuple[Tensor, Tensor]]:
    """Ragged histories, hidden frames, short rows, shared K/V heads; NaN in every unread frame."""
    pairs = []
    for heads, kv_heads, dim, chunk, block in (
        (4, 4, 36, 16, 16),
        (4, 2, 24, 4, 8),
        (2, 1, 16, 8, 8),
    ):
        width = 6
        table = torch.randperm(3 * width, device=DEVICE).view(3, width).int()
        seqlens = torch.tensor([0, 3 * block, 2 * block + chunk], device=DEVICE).int()
        starts = torch.tensor([0, 1, block - chunk], device=DEVICE).int()
        rows = PagedRows(table, seqlens, block, cache_starts=starts)
        num_new = torch.tensor([chunk, chunk, max(1, chunk - 3)], device=DEVICE)
        most = int((seqlens - starts).max()) + chunk
        layout = PagedLayout.build(rows, chunk_frames=chunk, num_frames=most, num_new_B=num_new)
        tables = AttentionTables(randn(200, heads, dim), randn(200, heads), randn(heads, dim))
        qkv, first = (
            randn(3, chunk, heads + 2 * kv_heads, dim),
            torch.tensor([0, 90, 150], device=DEVICE),
        )
        pools = [_poisoned_pool(rows, (3 * width, block, kv_heads, dim)) for _ in range(2)]
        results = []
        for attend in (paged_rel_attention, paged_rel_attention_definition):
            k_cache, v_cache = (pool.clone() for pool in pools)
            cache = PagedKVCache(
                k_cache, v_cache, table, seqlens, block, cache_starts=starts, layout=layout
            )
            mixed = attend(qkv, cache, tables, first)
            real = torch.arange(chunk, device=DEVICE) < num_new.unsqueeze(1)
            results.append((mixed[real], k_cache.nan_to_num(), v_cache.nan_to_num()))
        pairs += list(zip(*results, strict=True))
    return pairs


def _poisoned_pool(rows: PagedRows, shape: tuple[int, ...]) -> Tensor:
    """NaN but for the frames that the rows see."""
    pool = torch.full(shape, float("nan"), device=DEVICE)
    starts = rows.cache_starts
    assert starts is not None
    for row in range(rows.block_table.shape[0]):
        frames = torch.arange(int(starts[row]), int(rows.cache_seqlens[row]), device=DEVICE)
        index = rows.frame_index(frames.expand(rows.block_table.shape[0], -1))[row]
        flat = pool.view(-1, *shape[2:])
        flat[index] = torch.randn(len(index), *shape[2:], device=DEVICE)
    return pool


def check_subsampling() -> list[tuple[Tensor, Tensor]]:
    convolution = nn.Conv2d(1, 20, 3, 2, device=DEVICE)
    x = randn(2, 1, 19, 24)
    return [(convolution_relu(x, convolution), convolution_relu_definition(x, convolution))]


def check_best_tokens() -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for vocab_size in (7, 5000):
        scores = randn(2, 3, vocab_size) * 5
        got, expected = best_tokens(scores), best_tokens_definition(scores)
        pairs.append((got[0].float(), expected[0].float()))
        pairs.append((got[1].view(torch.float32), expected[1].view(torch.float32)))
    return pairs


def check_frames() -> list[tuple[Tensor, Tensor]]:
    """The framing kernel against its definition on the CPU, through the features they give."""
    from oasr_backend.features import fbank

    samples = randn(2, 1200) * 0.1 + 0.3
    pairs = []
    for config in (
        FbankConfig(),
        # A frame is as long as the FFT, so the kernel pads nothing.
        FbankConfig(frame_length_ms=32.0, frame_shift_ms=12.5),
        FbankConfig(sample_rate=11025, frame_length_ms=20.0, frame_shift_ms=20.0, window="hanning"),
    ):
        filterbank = LogMelFilterbank(config).to(DEVICE)
        got = filterbank._frames(samples)
        fbank.use_kernel = lambda _: False  # type: ignore[assignment]
        expected = filterbank._frames(samples)
        fbank.use_kernel = use_kernel
        pairs.append((got / 32768.0, expected / 32768.0))
    return pairs


def main() -> None:
    torch.manual_seed(0)
    assert use_kernel(randn(1)), "no kernel would run: set TRITON_INTERPRET=1 or use a GPU"
    with torch.inference_mode():
        for name in sys.argv[1:]:
            pairs = globals()[f"check_{name}"]()
            worst = max(float((got - expected).abs().max()) for got, expected in pairs)
            sys.stdout.write(f"{name}: {'equal' if worst < TOLERANCE else worst}\n")


if __name__ == "__main__":
    main()
