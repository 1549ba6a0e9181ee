"""The operations of a chunk of the Zipformer in plain loops, one number after another.

Written from the formulas of Yao et al., "Zipformer", 2024, in float64. Letters: B rows, T frames of
the chunk, L cached ones, K = L + T, H heads, D channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def swoosh(x: float, shift: float, offset: float) -> float:
    return math.log1p(math.exp(x - shift)) - 0.08 * x - offset


def bias_norm(row: list[float], bias: list[float], scale: float) -> list[float]:
    squares = [(x - b) ** 2 for x, b in zip(row, bias, strict=True)]
    return [x * scale / math.sqrt(sum(squares) / len(row)) for x in row]


def attention_weights(
    q_BTHC: Tensor, k_BKHC: Tensor, p_BTHP: Tensor, position_SHP: Tensor, num_seen: list[int]
) -> Tensor:
    batch, frames, heads, _ = q_BTHC.shape
    keys = k_BKHC.shape[1]
    weights = torch.zeros(batch, heads, frames, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(frames):
                scores = []
                for j in range(keys):
                    offset = j - (keys - frames) - i
                    content = float(q_BTHC[b, i, h] @ k_BKHC[b, j, h])
                    place = float(p_BTHP[b, i, h] @ position_SHP[offset + keys - 1, h])
                    seen = j >= keys - frames - num_seen[b]
                    scores.append(content + place if seen else -1000.0)
                most = max(scores)
                total = sum(math.exp(score - most) for score in scores)
                for j, score in enumerate(scores):
                    weights[b, h, i, j] = math.exp(score - most) / total
    return weights


def mixed(weights_BHTK: Tensor, value_BKX: Tensor) -> Tensor:
    batch, heads, frames, keys = weights_BHTK.shape
    width = value_BKX.shape[2] // heads
    out = torch.zeros(batch, frames, value_BKX.shape[2], dtype=torch.float64)
    for b in range(batch):
        for x in range(value_BKX.shape[2]):
            for i in range(frames):
                for j in range(keys):
                    out[b, i, x] += weights_BHTK[b, x // width, i, j] * value_BKX[b, j, x]
    return out


def convolved(
    window: list[float],
    causal: tuple[list[float], float],
    chunk: tuple[list[float], float],
    scale: list[float],
) -> list[float]:
    """One channel: `window` holds the frames of the state, then those of the chunk."""
    frames, state = len(scale), len(window) - len(scale)
    out = []
    for t in range(frames):
        before = causal[1] + sum(tap * window[t + i] for i, tap in enumerate(causal[0]))
        around = chunk[1]
        for i, tap in enumerate(chunk[0]):
            frame = t + i - len(chunk[0]) // 2
            if 0 <= frame < frames:
                around += tap * window[state + frame]
        out.append(swoosh(before + scale[t] * around, 1.0, 0.313261687))
    return out
