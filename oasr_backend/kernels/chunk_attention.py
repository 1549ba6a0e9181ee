"""Attention weights of one chunk over its window, and what is mixed by them.

Query i of the chunk and key j of the window (L cached frames, then the chunk's T) score
    q_i . k_j + p_i . position(j - L - i)
with nothing divided by a root: the Zipformer's weights hold that. The same weights are used three
times, which a call that gives only the mixed values cannot serve.

Shape letters: B rows, T new frames, L cached ones, K = L + T, H heads, C and P widths of a head's
query and position, S = K + T - 1 offsets, X heads and their values together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.operands import HIDDEN, HeadSizes, SlotRows
from oasr_backend.kernels.precision import cast, widened
from oasr_backend.kernels.traced import is_traced, static


def chunk_attention_weights(
    qkp_BTX: Tensor, key: SlotRows, position_SHP: Tensor, num_seen_B: Tensor, sizes: HeadSizes
) -> Tensor:
    """(B, H, T, K) in `qkp`'s dtype, softmax in float32.

    `qkp_BTX`: q (H * C), k (H * C), p (H * P), each by heads. `key`: (B, L, H * C).
    `position_SHP`: row s is of the key that lies s - (K - 1) frames after the query.
    `num_seen_B`: cached frames that the stream has filled, the last ones; may exceed L.
    """
    if not use_kernel(qkp_BTX):
        return chunk_attention_weights_definition(qkp_BTX, key, position_SHP, num_seen_B, sizes)
    from oasr_backend.kernels.chunk_attention_kernel import launch_chunk_attention_weights

    return launch_chunk_attention_weights(qkp_BTX, key, position_SHP, num_seen_B, sizes)


def attend_window(
    weights_BHTK: Tensor, values: SlotRows, new_BTX: Tensor, gate_BTX: Tensor | None = None
) -> Tensor:
    """(B, T, X): each head's part of X mixed by its weights, times `gate` where there is one.

    `values`: (B, L, X), the frames before `new`. H divides X. `weights` may be a slice of heads.
    """
    if not use_kernel(new_BTX):
        return attend_window_definition(weights_BHTK, values, new_BTX, gate_BTX)
    from oasr_backend.kernels.chunk_attention_kernel import launch_attend_window

    return launch_attend_window(weights_BHTK, values, new_BTX, gate_BTX)


def chunk_attention_weights_definition(
    qkp_BTX: Tensor, key: SlotRows, position_SHP: Tensor, num_seen_B: Tensor, sizes: HeadSizes
) -> Tensor:
    heads, query_dim, position_dim = sizes
    frames = static(qkp_BTX.shape[1])
    widths = (heads * query_dim, heads * query_dim, heads * position_dim)
    q_BTX, k_BTX, p_BTX = qkp_BTX.split(widths, dim=2)
    k_BKX = torch.cat((cast(key.gather(), k_BTX.dtype), k_BTX), dim=1)
    content_BHTK = _by_heads(q_BTX, heads) @ _by_heads(k_BKX, heads).transpose(2, 3)
    position_HPS = cast(position_SHP, p_BTX.dtype).permute(1, 2, 0)
    offset_BHTS = _by_heads(p_BTX, heads) @ position_HPS
    score_BHTK = widened(content_BHTK) + widened(_shifted(offset_BHTS, frames))
    hidden_B11K = _hidden(num_seen_B, static(k_BKX.shape[1]), frames)
    score_BHTK = score_BHTK.masked_fill(hidden_B11K, HIDDEN)
    return cast(score_BHTK.softmax(dim=-1), qkp_BTX.dtype)


def attend_window_definition(
    weights_BHTK: Tensor, values: SlotRows, new_BTX: Tensor, gate_BTX: Tensor | None = None
) -> Tensor:
    heads = static(weights_BHTK.shape[1])
    value_BKX = torch.cat((cast(values.gather(), new_BTX.dtype), new_BTX), dim=1)
    if heads == 1:
        mixed_BTX = weights_BHTK[:, 0] @ value_BKX
    else:
        mixed_BHTC = weights_BHTK @ _by_heads(value_BKX, heads)
        mixed_BTHC = mixed_BHTC.transpose(1, 2)
        if is_traced() and gate_BTX is None:
            return mixed_BTHC  # Its user flattens it anyway.
        mixed_BTX = mixed_BTHC.flatten(2)
    return mixed_BTX if gate_BTX is None else mixed_BTX * gate_BTX


def _by_heads(x_BTX: Tensor, heads: int) -> Tensor:
    """(B, H, T, width of a head)."""
    frames, width = static(x_BTX.shape[1]), static(x_BTX.shape[2])
    return x_BTX.reshape(-1, frames, heads, width // heads).transpose(1, 2)


def _shifted(offset_BHTS: Tensor, frames: int) -> Tensor:
    """From offsets to keys: element (i, j) is that of offset j - i + T - 1.

    In memory those lie S - 1 apart from query to query, so that a cut of the flat rows, folded at
    S - 1, has them in place.
    """
    if frames == 1:
        return offset_BHTS
    heads, offsets = static(offset_BHTS.shape[1]), static(offset_BHTS.shape[3])
    flat_BHN = offset_BHTS.reshape(-1, heads, frames * offsets)
    folded_BHN = flat_BHN[:, :, frames - 1 : frames - 1 + frames * (offsets - 1)]
    folded_BHTN = folded_BHN.reshape(-1, heads, frames, offsets - 1)
    return folded_BHTN[..., : offsets - frames + 1]


def _hidden(num_seen_B: Tensor, keys: int, frames: int) -> Tensor:
    """(B, 1, 1, K): the first columns, which no frame has filled."""
    column_K = torch.arange(keys, dtype=num_seen_B.dtype, device=num_seen_B.device)
    return column_K < (keys - frames - num_seen_B).reshape(-1, 1, 1, 1)
