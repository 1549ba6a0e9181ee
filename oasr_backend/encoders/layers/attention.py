"""Self-attention over the paged cache, with WeNet's position term.

WeNet drops Transformer-XL's shift (Dai et al., 2019, appendix B). Query i and key j score
    (q_i + u) . k_j + (q_i + v) . p_j  =  q_i . (k_j + p_j) + u . k_j + v . p_j
with p_j the projected sinusoid of the key's *absolute* position. So positions cost one addition to
the keys and one bias a key, and plain scaled dot-product attention does the rest.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.cache.paged_kv import PagedKVCache


class RelPositionAttention(nn.Module):
    """Pre-norm multi-head attention; `num_kv_heads` < `num_heads` shares K/V among heads."""

    position_PHC: Tensor
    position_bias_PH: Tensor

    def __init__(
        self, model_dim: int, *, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.norm = nn.LayerNorm(model_dim, eps=norm_eps)
        self.qkv = nn.Linear(model_dim, (num_heads + 2 * num_kv_heads) * head_dim)
        self.project = nn.Linear(num_heads * head_dim, model_dim)
        self.bias_u_HC = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.bias_v_HC = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.project_position = nn.Linear(model_dim, num_heads * head_dim, bias=False)
        # p_j and v . p_j of every position: see `tabulate_positions`.
        self.register_buffer("position_PHC", torch.zeros(1, num_heads, head_dim))
        self.register_buffer("position_bias_PH", torch.zeros(1, num_heads))

    def tabulate_positions(self, sinusoid_PD: Tensor) -> None:
        """Projects positions 0 .. P-1 once, so that a step only looks rows up."""
        position_PHC = self.project_position(sinusoid_PD).view(-1, self.num_heads, self.head_dim)
        self.position_PHC = position_PHC.detach().contiguous()
        self.position_bias_PH = (position_PHC * self.bias_v_HC).sum(-1).detach()

    def forward(self, x_BTD: Tensor, kv: PagedKVCache, position_BK: Tensor) -> Tensor:
        """Writes the chunk's keys and values into `kv`, then attends over history and chunk.

        `position_BK` holds the absolute position of each visible key; columns that
        `kv.layout.valid_BK` rules out may hold anything inside the position table.
        """
        batch, chunk_frames = x_BTD.shape[:2]
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(self.norm(x_BTD)).view(batch, chunk_frames, -1, self.head_dim)
        q_BTHC, k_BTHC, v_BTHC = qkv.split((heads, kv_heads, kv_heads), dim=2)
        kv.write(k_BTHC, v_BTHC)
        k_BKHC, v_BKHC = kv.gather()
        if kv_heads < heads:
            k_BKHC = k_BKHC.repeat_interleave(heads // kv_heads, dim=2)
            v_BKHC = v_BKHC.repeat_interleave(heads // kv_heads, dim=2)
        mixed_BHTC = F.scaled_dot_product_attention(
            q_BTHC.transpose(1, 2),
            (k_BKHC + self._positions(position_BK)).transpose(1, 2),
            v_BKHC.transpose(1, 2),
            attn_mask=self._key_bias(k_BKHC, position_BK, kv.layout.valid_BK),
        )
        change_BTD: Tensor = self.project(mixed_BHTC.transpose(1, 2).flatten(2))
        return x_BTD + change_BTD

    def _positions(self, position_BK: Tensor) -> Tensor:
        rows = self.position_PHC.index_select(0, position_BK.flatten())
        return rows.view(*position_BK.shape, self.num_heads, self.head_dim)

    def _key_bias(self, k_BKHC: Tensor, position_BK: Tensor, valid_BK: Tensor) -> Tensor:
        """(B, H, 1, K): the terms of the score that depend on the key alone; -inf where unseen."""
        position_term = self.position_bias_PH.index_select(0, position_BK.flatten())
        content_BKH = (k_BKHC * self.bias_u_HC).sum(-1)
        bias_BKH = (content_BKH + position_term.view_as(content_BKH)) / math.sqrt(self.head_dim)
        bias_BKH = bias_BKH.masked_fill(~valid_BK.unsqueeze(-1), float("-inf"))
        return bias_BKH.transpose(1, 2).unsqueeze(2)
