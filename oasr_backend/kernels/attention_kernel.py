"""Triton kernel of `paged_rel_attention`: one program a stream and head, softmax online."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import next_power_of_two, on_its_device
from oasr_backend.kernels.operands import AttentionTables, KeyValuePages

#: Keys of one tile and warps of one program: the queries are few, so small tiles keep many going.
_KEYS = 16
_WARPS = 1
_LOG2_E = math.log2(math.e)


@triton.jit
def _paged_rel_attention(
    qkv_ptr, k_pool_ptr, v_pool_ptr, read_ptr, write_ptr,
    history_ptr, total_ptr, first_position_ptr, position_ptr,
    position_bias_ptr, bias_u_ptr, out_ptr, scale, num_positions,
    T: tl.constexpr, NUM_KEYS: tl.constexpr, H: tl.constexpr, H_KV: tl.constexpr, C: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // (H // H_KV)
    heads_all: tl.constexpr = H + 2 * H_KV
    time_T = tl.arange(0, BLOCK_T)
    channel_C = tl.arange(0, BLOCK_C)
    real_C = channel_C < C
    new_ptr = qkv_ptr + stream * T * heads_all * C
    keep_TC = (time_T < T)[:, None] & real_C[None, :]
    frame_TC = time_T[:, None] * (heads_all * C) + channel_C[None, :]
    q_TC = tl.load(new_ptr + frame_TC + head * C, mask=keep_TC, other=0.0)
    k_new_ptr = new_ptr + (H + kv_head) * C
    v_new_ptr = new_ptr + (H + H_KV + kv_head) * C
    if head % (H // H_KV) == 0:
        slot_T = tl.load(write_ptr + stream * T + time_T, mask=time_T < T, other=0)
        pool_TC = slot_T[:, None] * (H_KV * C) + kv_head * C + channel_C[None, :]
        k_TC = tl.load(k_new_ptr + frame_TC, mask=keep_TC, other=0.0)
        v_TC = tl.load(v_new_ptr + frame_TC, mask=keep_TC, other=0.0)
        tl.store(k_pool_ptr + pool_TC, k_TC, mask=keep_TC)
        tl.store(v_pool_ptr + pool_TC, v_TC, mask=keep_TC)
    history = tl.load(history_ptr + stream)
    total = tl.load(total_ptr + stream)
    first_position = tl.load(first_position_ptr + stream)
    u_C = tl.load(bias_u_ptr + head * C + channel_C, mask=real_C, other=0.0).to(tl.float32)
    best_T = tl.full((BLOCK_T,), -1.0e30, dtype=tl.float32)
    weight_T = tl.zeros((BLOCK_T,), dtype=tl.float32)
    mixed_TC = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for begin in range(0, NUM_KEYS, BLOCK_K):
        key_K = begin + tl.arange(0, BLOCK_K)
        seen_K = key_K < total
        old_K = key_K < history
        old_KC = old_K[:, None] & real_C[None, :]
        new_KC = (seen_K & (key_K >= history))[:, None] & real_C[None, :]
        slot_K = tl.load(read_ptr + stream * NUM_KEYS + key_K, mask=old_K, other=0)
        pool_KC = slot_K[:, None] * (H_KV * C) + kv_head * C + channel_C[None, :]
        fresh_KC = (key_K - history)[:, None] * (heads_all * C) + channel_C[None, :]
        k_KC = tl.load(k_pool_ptr + pool_KC, mask=old_KC, other=0.0) + tl.load(
            k_new_ptr + fresh_KC, mask=new_KC, other=0.0
        )
        v_KC = tl.load(v_pool_ptr + pool_KC, mask=old_KC, other=0.0) + tl.load(
            v_new_ptr + fresh_KC, mask=new_KC, other=0.0
        )
        position_K = tl.minimum(first_position + key_K, num_positions - 1)
        position_KC = position_K[:, None] * (H * C) + head * C + channel_C[None, :]
        p_KC = tl.load(position_ptr + position_KC, mask=old_KC | new_KC, other=0.0)
        bias_K = tl.sum(k_KC.to(tl.float32) * u_C[None, :], axis=1)
        bias_K += tl.load(position_bias_ptr + position_K * H + head).to(tl.float32)
        score_TK = tl.dot(q_TC, tl.trans((k_KC + p_KC).to(q_TC.dtype)), input_precision="ieee")
        score_TK = (score_TK + bias_K[None, :]) * scale
        score_TK = tl.where(seen_K[None, :], score_TK, -1.0e30)
        best_next_T = tl.maximum(best_T, tl.max(score_TK, axis=1))
        shrink_T = tl.exp2(best_T - best_next_T)
        weight_TK = tl.where(seen_K[None, :], tl.exp2(score_TK - best_next_T[:, None]), 0.0)
        weight_T = weight_T * shrink_T + tl.sum(weight_TK, axis=1)
        mixed_TC = mixed_TC * shrink_T[:, None]
        mixed_TC += tl.dot(weight_TK.to(v_KC.dtype), v_KC, input_precision="ieee")
        best_T = best_next_T
    mixed_TC = mixed_TC / weight_T[:, None]
    place_TC = (stream * T + time_T[:, None]) * (H * C) + head * C + channel_C[None, :]
    tl.store(out_ptr + place_TC, mixed_TC.to(out_ptr.dtype.element_ty), mask=keep_TC)


@on_its_device
def launch_paged_rel_attention(
    qkv_BTGC: Tensor, kv: KeyValuePages, tables: AttentionTables, first_position_B: Tensor
) -> Tensor:
    layout = kv.layout
    batch, num_frames, _, head_dim = qkv_BTGC.shape
    heads, kv_heads = tables.num_heads, kv.k_cache.shape[2]
    qkv_BTGC = qkv_BTGC.contiguous()
    out = qkv_BTGC.new_empty((batch, num_frames, heads * head_dim))
    _paged_rel_attention[(batch, heads)](
        qkv_BTGC, kv.k_cache, kv.v_cache, layout.read_index_BK, layout.write_index_N,
        layout.history_B, layout.visible_B, first_position_B, tables.position_PHC,
        tables.position_bias_PH, tables.bias_u_HC, out, _LOG2_E / math.sqrt(head_dim),
        tables.position_PHC.shape[0],
        T=num_frames, NUM_KEYS=layout.num_frames, H=heads, H_KV=kv_heads, C=head_dim,
        BLOCK_T=next_power_of_two(num_frames, least=16), BLOCK_K=_KEYS,
        BLOCK_C=next_power_of_two(head_dim, least=16), num_warps=_WARPS,
    )  # fmt: skip
    return out
