"""The Zipformer over a whole utterance at once, under the mask of its chunks, in float64.

Slow and plain: no states, no windows, no constants made beforehand. Weights go by their names in an
icefall checkpoint. Shape letters: W feature frames, F mel bins, T frames of a stack, D its width,
C channels, M mel columns, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_HIDDEN = -1000.0


@dataclass(frozen=True)
class Weights:
    """The tensors behind one prefix."""

    tensors: Mapping[str, Any]
    prefix: str = ""

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self.tensors[self.prefix + name], dtype=np.float64)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def under(self, name: str) -> Weights:
        return Weights(self.tensors, f"{self.prefix}{name}.")


@dataclass(frozen=True)
class Chunking:
    """Frames of a chunk and of its left context, both at 50 Hz."""

    chunk: int
    left: int

    def over(self, rate: int) -> Chunking:
        return Chunking(self.chunk // rate, self.left // rate)


def encode(
    features_WF: npt.NDArray[Any],
    tensors: Mapping[str, Any],
    heads: tuple[int, ...],
    chunking: Chunking,
) -> Array:
    """(T, D) at 25 Hz of features with all their padding: 2 * chunk * n + 13 of them."""
    w = Weights(tensors)
    x_TD = front_end(np.asarray(features_WF, dtype=np.float64), w.under("encoder_embed"))
    outputs = []
    for number, num_heads in enumerate(heads):
        stack = w.under(f"encoder.encoders.{number}")
        width = _width(stack)
        x_TD = np.pad(x_TD, ((0, 0), (0, max(0, width - x_TD.shape[1]))))[:, :width]
        x_TD = _stack(x_TD, stack, num_heads, chunking)
        outputs.append(x_TD)
    whole_TD = outputs[-1]
    for x_TD in reversed(outputs):
        whole_TD = np.concatenate((whole_TD, x_TD[:, whole_TD.shape[1] :]), axis=1)
    return _averaged(whole_TD, w["encoder.downsample_output.bias"])


def front_end(features_WF: Array, w: Weights) -> Array:
    x_CTM = features_WF[None]
    for index, strides, edge in ((0, (1, 1), 1), (4, (2, 2), 0), (7, (1, 2), 0)):
        kernel, bias = w[f"conv.{index}.weight"], w[f"conv.{index}.bias"]
        x_CTM = _swoosh_r(_convolved(x_CTM, kernel, strides, edge) + bias[:, None, None])
    frames = x_CTM.shape[1] - 3
    around_CTM = np.pad(x_CTM, ((0, 0), (3, 0), (3, 3)))
    kernel_Ckk, mixed_CTM = w["convnext.depthwise_conv.weight"][:, 0], 0.0
    for time in range(7):
        for mel in range(7):
            seen_CTM = around_CTM[:, time : time + frames, mel : mel + x_CTM.shape[2]]
            mixed_CTM = mixed_CTM + kernel_Ckk[:, time, mel, None, None] * seen_CTM
    mixed_CTM = mixed_CTM + w["convnext.depthwise_conv.bias"][:, None, None]
    hidden = np.einsum("oi,itm->otm", w["convnext.pointwise_conv1.weight"][:, :, 0, 0], mixed_CTM)
    hidden = _swoosh_l(hidden + w["convnext.pointwise_conv1.bias"][:, None, None])
    change = np.einsum("oi,itm->otm", w["convnext.pointwise_conv2.weight"][:, :, 0, 0], hidden)
    change = change + w["convnext.pointwise_conv2.bias"][:, None, None]
    x_CTM = x_CTM[:, :frames] + change
    flat_TX = x_CTM.transpose(1, 0, 2).reshape(frames, -1)
    return _bias_norm(_linear(flat_TX, w.under("out")), w.under("out_norm"))


def _convolved(x_CTM: Array, kernel: Array, strides: tuple[int, int], edge: int) -> Array:
    x_CTM = np.pad(x_CTM, ((0, 0), (0, 0), (edge, edge)))
    frames = (x_CTM.shape[1] - 3) // strides[0] + 1
    columns = (x_CTM.shape[2] - 3) // strides[1] + 1
    total = np.zeros((kernel.shape[0], frames, columns))
    for time in range(3):
        for mel in range(3):
            seen_CTM = x_CTM[:, time :: strides[0], mel :: strides[1]][:, :frames, :columns]
            total += np.einsum("oi,itm->otm", kernel[:, :, time, mel], seen_CTM)
    return total


def _width(stack: Weights) -> int:
    layers = stack.under("encoder") if "downsample.bias" in stack else stack
    return len(layers["layers.0.norm.bias"])


def _stack(x0_TD: Array, stack: Weights, num_heads: int, chunking: Chunking) -> Array:
    if "downsample.bias" not in stack:
        return _layers(x0_TD, stack, num_heads, chunking)
    shares = stack["downsample.bias"]
    x_TD = _averaged(x0_TD, shares)
    x_TD = _layers(x_TD, stack.under("encoder"), num_heads, chunking.over(len(shares)))
    x_TD = np.repeat(x_TD, len(shares), axis=0)
    return x0_TD + (x_TD - x0_TD) * stack["out_combiner.bypass_scale"]


def _averaged(x_TD: Array, bias: Array) -> Array:
    shares = np.exp(bias) / np.exp(bias).sum()
    return sum(share * x_TD[start :: len(shares)] for start, share in enumerate(shares))  # type: ignore[return-value]


def _layers(x_TD: Array, w: Weights, num_heads: int, chunking: Chunking) -> Array:
    number = 0
    while f"layers.{number}.norm.bias" in w:
        x_TD = _layer(x_TD, w.under(f"layers.{number}"), num_heads, chunking)
        number += 1
    return x_TD


def _layer(x0_TD: Array, w: Weights, num_heads: int, chunking: Chunking) -> Array:
    weights_HTT = _attention(x0_TD, w.under("self_attn_weights"), num_heads, chunking)
    x_TD = x0_TD + _feed_forward(x0_TD, w.under("feed_forward1"))
    x_TD = x_TD + _nonlinear(x_TD, weights_HTT[0], w.under("nonlin_attention"))
    x_TD = x_TD + _mixed_values(x_TD, weights_HTT, w.under("self_attn1"))
    x_TD = x_TD + _convolution(x_TD, w.under("conv_module1"), chunking.chunk)
    x_TD = x_TD + _feed_forward(x_TD, w.under("feed_forward2"))
    x_TD = x0_TD + (x_TD - x0_TD) * w["bypass_mid.bypass_scale"]
    x_TD = x_TD + _mixed_values(x_TD, weights_HTT, w.under("self_attn2"))
    x_TD = x_TD + _convolution(x_TD, w.under("conv_module2"), chunking.chunk)
    x_TD = x_TD + _feed_forward(x_TD, w.under("feed_forward3"))
    x_TD = _bias_norm(x_TD, w.under("norm"))
    return x0_TD + (x_TD - x0_TD) * w["bypass.bypass_scale"]


def _attention(x_TD: Array, w: Weights, num_heads: int, chunking: Chunking) -> Array:
    frames, projected_TX = len(x_TD), _linear(x_TD, w.under("in_proj"))
    linear_pos = w["linear_pos.weight"]
    position_dim = len(linear_pos) // num_heads
    query_dim = (projected_TX.shape[1] - len(linear_pos)) // (2 * num_heads)
    keys_at, positions_at = num_heads * query_dim, 2 * num_heads * query_dim
    scores_HTT = np.full((num_heads, frames, frames), _HIDDEN)
    for query in range(frames):
        begin = query - query % chunking.chunk
        seen = range(max(0, begin - chunking.left), begin + chunking.chunk)
        for head in range(num_heads):
            q = projected_TX[query, head * query_dim :][:query_dim]
            p = projected_TX[query, positions_at + head * position_dim :][:position_dim]
            of_head = p @ linear_pos[head * position_dim :][:position_dim]
            k_KX = projected_TX[seen, keys_at + head * query_dim :][:, :query_dim]
            encoded = np.stack([_encoded(key - query, linear_pos.shape[1]) for key in seen])
            scores_HTT[head, query, seen] = k_KX @ q + encoded @ of_head
    exponents = np.exp(scores_HTT - scores_HTT.max(axis=2, keepdims=True))
    weights_HTT: Array = exponents / exponents.sum(axis=2, keepdims=True)
    return weights_HTT


_KNOWN: dict[tuple[int, int], Array] = {}


def _encoded(distance: int, size: int) -> Array:
    """What is known of a distance; each is worked out once."""
    if (distance, size) not in _KNOWN:
        root, encoded = np.sqrt(size), np.empty(size)
        squeezed = root * np.sign(distance) * (np.log(abs(distance) + root) - np.log(root))
        angle = np.arctan(2 * np.pi * squeezed / size)
        for m in range(size // 2):
            encoded[2 * m], encoded[2 * m + 1] = np.cos((m + 1) * angle), np.sin((m + 1) * angle)
        encoded[-1] = 1.0
        _KNOWN[distance, size] = encoded
    return _KNOWN[distance, size]


def _mixed_values(x_TD: Array, weights_HTT: Array, w: Weights) -> Array:
    heads = np.split(_linear(x_TD, w.under("in_proj")), len(weights_HTT), axis=1)
    mixed = [weights_TT @ values for weights_TT, values in zip(weights_HTT, heads, strict=True)]
    return _linear(np.concatenate(mixed, axis=1), w.under("out_proj"))


def _nonlinear(x_TD: Array, weights_TT: Array, w: Weights) -> Array:
    s, x, y = np.split(_linear(x_TD, w.under("in_proj")), 3, axis=1)
    return _linear((weights_TT @ (x * np.tanh(s))) * y, w.under("out_proj"))


def _feed_forward(x_TD: Array, w: Weights) -> Array:
    return _linear(_swoosh_l(_linear(x_TD, w.under("in_proj"))), w.under("out_proj"))


def _convolution(x_TD: Array, w: Weights, chunk: int) -> Array:
    x_TD, gate_TD = np.split(_linear(x_TD, w.under("in_proj")), 2, axis=1)
    gated_TD = x_TD / (1 + np.exp(-gate_TD))
    w_depthwise = w.under("depthwise_conv")
    causal_Dk = w_depthwise["causal_conv.weight"][:, 0]
    past = causal_Dk.shape[1] - 1
    before_TD = np.pad(gated_TD, ((past, 0), (0, 0)))
    sum_TD = np.zeros_like(gated_TD) + w_depthwise["causal_conv.bias"]
    for tap in range(past + 1):
        sum_TD += causal_Dk[:, tap] * before_TD[tap : tap + len(gated_TD)]
    for start in range(0, len(gated_TD), chunk):
        sum_TD[start : start + chunk] += _of_chunk(gated_TD[start : start + chunk], w_depthwise)
    return _linear(_swoosh_r(sum_TD), w.under("out_proj"))


def _of_chunk(gated_TD: Array, w: Weights) -> Array:
    kernel_Dk, frames = w["chunkwise_conv.weight"][:, 0], len(gated_TD)
    size = kernel_Dk.shape[1]
    around_TD = np.pad(gated_TD, ((size // 2, size // 2), (0, 0)))
    left_Dk, right_Dk = w["chunkwise_conv_scale"]
    rows = []
    for t in range(frames):
        row = w["chunkwise_conv.bias"] + (kernel_Dk.T * around_TD[t : t + size]).sum(axis=0)
        scale = np.ones(len(row))
        if t < size:
            scale = scale + left_Dk[:, t]
        if size - frames + t >= 0:
            scale = scale + right_Dk[:, size - frames + t]
        rows.append(scale * row)
    return np.stack(rows)


def _linear(x_TX: Array, w: Weights) -> Array:
    return x_TX @ w["weight"].T + w["bias"]


def _bias_norm(x_TD: Array, w: Weights) -> Array:
    square_T1 = ((x_TD - w["bias"]) ** 2).mean(axis=1, keepdims=True)
    return x_TD * np.exp(w["log_scale"]) / np.sqrt(square_T1)


def _swoosh_l(x: Array) -> Array:
    return np.logaddexp(0.0, x - 4.0) - 0.08 * x - 0.035


def _swoosh_r(x: Array) -> Array:
    return np.logaddexp(0.0, x - 1.0) - 0.08 * x - 0.313261687
