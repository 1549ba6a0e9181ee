"""Triton kernels of `chunk_attention_weights` and `attend_window`.

A program is one row and head, and at most a few frames of the chunk; the window stays in registers.
Cached frames and those of the chunk are two tiles, since their sizes are close to powers of two and
their sum is not.

Shape letters: T frames of a program, L cached frames, N frames of the chunk, K = L + N, Q and P
widths of a head's query and position, S offsets between query and key, C columns of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import next_power_of_two, on_its_device
from oasr_backend.kernels.operands import HIDDEN, HeadSizes, SlotRows

#: The least side of a tile that a tensor core multiplies; frames of a program that weighs keys.
_LEAST = 16
#: What a warp weighs of a query's keys; wider numbers are multiplied without tensor cores.
_BYTES_OF_A_WARP = 64
#: Frames of a program that mixes values, and the keys that it reads at a time.
_MOST_FRAMES, _KEYS, _WIDE_KEYS = 64, 128, 32
#: Columns of a program that mixes values: a wide head is shared by several.
_MOST_COLUMNS = 64


@triton.jit
def _position_scores(
    p_T1P, position_ptr, offset_TK, keep_TK,
    S_STEP: tl.constexpr, P_STEP: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """(T, K): each query's p times the position at its offset from each key."""
    part_11P = tl.arange(0, BLOCK_P)[None, None, :]
    place_TKP = (offset_TK * S_STEP)[:, :, None] + part_11P * P_STEP
    keep_TKP = keep_TK[:, :, None] & (part_11P < P)
    position_TKP = tl.load(position_ptr + place_TKP, mask=keep_TKP, other=0.0).to(tl.float32)
    return tl.sum(p_T1P * position_TKP, axis=2)


@triton.jit
def _chunk_attention_weights(
    qkp_ptr, key_ptr, slot_ptr, position_ptr, seen_ptr, out_ptr, slot_size,
    S_STEP: tl.constexpr, H_STEP: tl.constexpr, P_STEP: tl.constexpr, HIDDEN: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = H * (2 * Q + P)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    frame_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    old_L, new_N = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_N)
    channel_Q, part_P = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_P)
    keep_T, real_1Q = frame_T < N, (channel_Q < Q)[None, :]
    unseen = L - tl.load(seen_ptr + row)
    seen_L = (old_L >= unseen) & (old_L < L)
    keep_TL = keep_T[:, None] & seen_L[None, :]
    keep_TN = keep_T[:, None] & (new_N < N)[None, :]
    qkp_ptr += row * N * WIDTH
    query_ptr = qkp_ptr + frame_T[:, None] * WIDTH + head * Q + channel_Q[None, :]
    q_TQ = tl.load(query_ptr, mask=keep_T[:, None] & real_1Q, other=0.0)
    place_T1P = (2 * H * Q + head * P + frame_T * WIDTH)[:, None, None] + part_P[None, None, :]
    keep_T1P = keep_T[:, None, None] & (part_P < P)[None, None, :]
    p_T1P = tl.load(qkp_ptr + place_T1P, mask=keep_T1P, other=0.0).to(tl.float32)

    key_ptr += tl.load(slot_ptr + row) * slot_size + head * Q
    old_ptr = key_ptr + old_L[:, None] * (H * Q) + channel_Q[None, :]
    k_LQ = tl.load(old_ptr, mask=seen_L[:, None] & real_1Q, other=0.0).to(q_TQ.dtype)
    new_ptr = qkp_ptr + new_N[:, None] * WIDTH + (H + head) * Q + channel_Q[None, :]
    k_NQ = tl.load(new_ptr, mask=(new_N < N)[:, None] & real_1Q, other=0.0).to(tl.float32)
    position_ptr += head * H_STEP
    offset_TL = (N - 1) - frame_T[:, None] + old_L[None, :]
    offset_TN = (L + N - 1) - frame_T[:, None] + new_N[None, :]
    score_TL = _position_scores(p_T1P, position_ptr, offset_TL, keep_TL, S_STEP, P_STEP, P, BLOCK_P)
    score_TN = _position_scores(p_T1P, position_ptr, offset_TN, keep_TN, S_STEP, P_STEP, P, BLOCK_P)
    score_TL += tl.dot(q_TQ, tl.trans(k_LQ), input_precision="ieee")
    # Few products; a second call of the tensor cores would keep the warps from sharing the first.
    score_TN += tl.sum(q_TQ.to(tl.float32)[:, None, :] * k_NQ[None, :, :], axis=2)
    score_TL = tl.where(seen_L[None, :], score_TL, HIDDEN)
    score_TL = tl.where(old_L[None, :] < L, score_TL, -float("inf"))
    score_TN = tl.where(new_N[None, :] < N, score_TN, -float("inf"))

    most_T = tl.maximum(tl.max(score_TL, axis=1), tl.max(score_TN, axis=1))
    weight_TL = tl.exp(score_TL - most_T[:, None])
    weight_TN = tl.exp(score_TN - most_T[:, None])
    sum_T = tl.sum(weight_TL, axis=1) + tl.sum(weight_TN, axis=1)
    weight_TL, weight_TN = weight_TL / sum_T[:, None], weight_TN / sum_T[:, None]
    dtype = out_ptr.dtype.element_ty
    out_T1 = out_ptr + ((row * H + head) * N + frame_T)[:, None] * (L + N)
    tl.store(
        out_T1 + old_L[None, :], weight_TL.to(dtype), mask=keep_T[:, None] & (old_L < L)[None, :]
    )
    tl.store(out_T1 + L + new_N[None, :], weight_TN.to(dtype), mask=keep_TN)


@on_its_device
def launch_chunk_attention_weights(
    qkp_BTX: Tensor, key: SlotRows, position_SHP: Tensor, num_seen_B: Tensor, sizes: HeadSizes
) -> Tensor:
    qkp_BTX = qkp_BTX.contiguous()
    batch, num_new, _ = qkp_BTX.shape
    cached = key.buffer.shape[1]
    heads = sizes.num_heads
    out_BHTK = qkp_BTX.new_empty((batch, heads, num_new, cached + num_new))
    block_cached = next_power_of_two(cached, least=_LEAST)
    _chunk_attention_weights[(heads, batch, triton.cdiv(num_new, _LEAST))](
        qkp_BTX, key.buffer, key.slot_ids, position_SHP, num_seen_B, out_BHTK,
        key.buffer.stride(0), HIDDEN=HIDDEN, S_STEP=position_SHP.stride(0),
        H_STEP=position_SHP.stride(1), P_STEP=position_SHP.stride(2),
        N=num_new, L=cached, H=heads, Q=sizes.query_dim, P=sizes.position_dim,
        BLOCK_T=_LEAST, BLOCK_L=block_cached,
        BLOCK_N=next_power_of_two(num_new, least=_LEAST),
        BLOCK_Q=next_power_of_two(sizes.query_dim, least=_LEAST),
        BLOCK_P=next_power_of_two(sizes.position_dim),
        num_warps=min(max(1, block_cached * qkp_BTX.element_size() // _BYTES_OF_A_WARP), 8),
    )  # fmt: skip
    return out_BHTK


@triton.jit
def _mix(
    mixed_TC, weight_T1, value_1C, value_row, keep_T1, real_1C, size,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`mixed` and what `SIZE` rows of values add to it, a block of rows at a time."""
    for begin in range(0, SIZE, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        keep_TR, keep_RC = keep_T1 & (row < size)[None, :], (row < size)[:, None] & real_1C
        weight_TR = tl.load(weight_T1 + row[None, :], mask=keep_TR, other=0.0)
        value_RC = tl.load(value_1C + row[:, None] * value_row, mask=keep_RC, other=0.0)
        mixed_TC = tl.dot(weight_TR, value_RC.to(weight_TR.dtype), mixed_TC, input_precision="ieee")
    return mixed_TC


@triton.jit
def _attend_window(
    weights_ptr, value_ptr, slot_ptr, new_ptr, gate_ptr, out_ptr, weights_row, weights_head,
    slot_size, new_row, new_frame, gate_row, gate_frame, HAS_GATE: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, X: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row = tl.program_id(1).to(tl.int64)
    frame_T1 = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    channel_1C = (part * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    keep_T1, real_1C = frame_T1 < N, channel_1C < C
    column_1C = head * C + channel_1C
    weight_T1 = weights_ptr + row * weights_row + head * weights_head + frame_T1 * (L + N)
    old_1C = value_ptr + tl.load(slot_ptr + row) * slot_size + column_1C
    new_1C = new_ptr + row * new_row + column_1C
    mixed_TC = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    mixed_TC = _mix(mixed_TC, weight_T1, old_1C, X, keep_T1, real_1C, L, L, BLOCK_L)
    mixed_TC = _mix(mixed_TC, weight_T1 + L, new_1C, new_frame, keep_T1, real_1C, N, N, BLOCK_N)
    keep_TC = keep_T1 & real_1C
    if HAS_GATE:
        gate_TC = gate_ptr + row * gate_row + frame_T1 * gate_frame + column_1C
        mixed_TC *= tl.load(gate_TC, mask=keep_TC, other=0.0).to(tl.float32)
    out_TC = out_ptr + (row * N + frame_T1) * X + column_1C
    tl.store(out_TC, mixed_TC.to(out_ptr.dtype.element_ty), mask=keep_TC)


@on_its_device
def launch_attend_window(
    weights_BHTK: Tensor, values: SlotRows, new_BTX: Tensor, gate_BTX: Tensor | None
) -> Tensor:
    batch, heads, num_new, num_keys = weights_BHTK.shape
    if weights_BHTK.stride(3) != 1 or weights_BHTK.stride(2) != num_keys:
        weights_BHTK = weights_BHTK.contiguous()
    new_BTX = _with_whole_rows(new_BTX)
    gate = new_BTX if gate_BTX is None else _with_whole_rows(gate_BTX)
    columns, cached = new_BTX.shape[2], num_keys - num_new
    width = columns // heads
    out_BTX = new_BTX.new_empty((batch, num_new, columns))
    block_columns = min(next_power_of_two(width, least=_LEAST), _MOST_COLUMNS)
    block_frames = min(next_power_of_two(num_new, least=_LEAST), _MOST_FRAMES)
    # Wide numbers are multiplied without tensor cores, from registers.
    keys = _KEYS if weights_BHTK.element_size() == 2 else _WIDE_KEYS
    parts = triton.cdiv(width, block_columns)
    _attend_window[(heads * parts, batch, triton.cdiv(num_new, block_frames))](
        weights_BHTK, values.buffer, values.slot_ids, new_BTX, gate, out_BTX,
        weights_BHTK.stride(0), weights_BHTK.stride(1), values.buffer.stride(0),
        new_BTX.stride(0), new_BTX.stride(1), gate.stride(0), gate.stride(1),
        HAS_GATE=gate_BTX is not None,
        N=num_new, L=cached, X=columns, C=width, PARTS=parts,
        BLOCK_T=block_frames, BLOCK_L=min(next_power_of_two(cached, least=_LEAST), keys),
        BLOCK_N=min(block_frames, keys), BLOCK_C=block_columns,
        num_warps=4 if block_columns > _LEAST else 1,
    )  # fmt: skip
    return out_BTX


def _with_whole_rows(x_BTX: Tensor) -> Tensor:
    """`x`, or a copy where a frame's values do not lie side by side."""
    return x_BTX if x_BTX.stride(2) == 1 else x_BTX.contiguous()
