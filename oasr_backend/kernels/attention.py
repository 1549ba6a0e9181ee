"""Attention of one chunk over its stream's paged history, with WeNet's position term.

WeNet drops Transformer-XL's shift (Dai et al., 2019, appendix B). Query i and key j score
    (q_i + u) . k_j + (q_i + v) . p_j  =  q_i . (k_j + p_j) + u . k_j + v . p_j
with p_j the projected sinusoid of the key's *absolute* position. So positions cost one addition to
the keys and one bias a key, and plain scaled dot-product attention does the rest.

Shape letters: B rows, T new frames, K keys (history and new), H heads, C head dimension,
P positions, G query, key and value heads together.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.operands import AttentionTables, KeyValuePages
from oasr_backend.kernels.traced import is_traced, paged_rel_attention_traced


def paged_rel_attention(
    qkv_BTGC: Tensor, kv: KeyValuePages, tables: AttentionTables, first_position_B: Tensor
) -> Tensor:
    """Writes the chunk's K/V into its pages and returns (B, T, H * C).

    `qkv_BTGC` holds H query heads, then the K heads, then the V heads. `first_position_B` is the
    absolute position of each row's oldest visible key.
    """
    if is_traced():
        return paged_rel_attention_traced(qkv_BTGC, kv, tables, first_position_B)
    if not use_kernel(qkv_BTGC):
        return paged_rel_attention_definition(qkv_BTGC, kv, tables, first_position_B)
    from oasr_backend.kernels.attention_kernel import launch_paged_rel_attention

    return launch_paged_rel_attention(qkv_BTGC, kv, tables, first_position_B)


def paged_rel_attention_definition(
    qkv_BTGC: Tensor, kv: KeyValuePages, tables: AttentionTables, first_position_B: Tensor
) -> Tensor:
    heads = tables.num_heads
    kv_heads = (qkv_BTGC.shape[2] - heads) // 2
    q_BTHC, k_BTHC, v_BTHC = qkv_BTGC.split((heads, kv_heads, kv_heads), dim=2)
    kv.write(k_BTHC, v_BTHC)
    k_BKHC, v_BKHC = kv.gather()
    if kv_heads < heads:
        k_BKHC = k_BKHC.repeat_interleave(heads // kv_heads, dim=2)
        v_BKHC = v_BKHC.repeat_interleave(heads // kv_heads, dim=2)
    position_N = _key_positions(kv, tables, first_position_B)
    position_BKHC = tables.position_PHC.index_select(0, position_N).view_as(k_BKHC)
    mixed_BHTC = F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        (k_BKHC + position_BKHC).transpose(1, 2),
        v_BKHC.transpose(1, 2),
        attn_mask=_key_bias(k_BKHC, kv, tables, position_N),
    )
    return mixed_BHTC.transpose(1, 2).flatten(2)


def _key_positions(kv: KeyValuePages, tables: AttentionTables, first_position_B: Tensor) -> Tensor:
    """(B * K) rows of the position tables. Columns past a row's last key are masked, not read."""
    step_K = torch.arange(kv.layout.num_frames, device=first_position_B.device)
    position_BK = first_position_B.unsqueeze(1) + step_K
    return position_BK.clamp(max=tables.position_PHC.shape[0] - 1).flatten()


def _key_bias(
    k_BKHC: Tensor, kv: KeyValuePages, tables: AttentionTables, position_N: Tensor
) -> Tensor:
    """(B, H, 1, K): the terms of the score that depend on the key alone; -inf where unseen."""
    content_BKH = (k_BKHC * tables.bias_u_HC).sum(-1)
    position_BKH = tables.position_bias_PH.index_select(0, position_N).view_as(content_BKH)
    bias_BKH = (content_BKH + position_BKH) / math.sqrt(k_BKHC.shape[-1])
    bias_BKH = bias_BKH.masked_fill(~kv.layout.valid_BK.unsqueeze(-1), float("-inf"))
    return bias_BKH.transpose(1, 2).unsqueeze(2)
