"""Self-attention over the paged cache; `oasr_backend.kernels.attention` holds its formula."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.kernels import AttentionTables, paged_rel_attention


class RelPositionAttention(nn.Module):
    """Multi-head attention on normalised input; `num_kv_heads` < `num_heads` shares K/V."""

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
        # They follow from the weights, so that no checkpoint holds them.
        self.register_buffer("position_PHC", torch.zeros(1, num_heads, head_dim), persistent=False)
        self.register_buffer("position_bias_PH", torch.zeros(1, num_heads), persistent=False)

    def tabulate_positions(self, sinusoid_PD: Tensor) -> None:
        """Projects positions 0 .. P-1 once, so that a step only looks rows up."""
        position_PHC = self.project_position(sinusoid_PD).view(-1, self.num_heads, self.head_dim)
        self.position_PHC = position_PHC.detach().contiguous()
        self.position_bias_PH = (position_PHC * self.bias_v_HC).sum(-1).detach()

    def forward(self, normed_ND: Tensor, kv: PagedKVCache, first_position_B: Tensor) -> Tensor:
        """What attention adds to the residual. The chunk's keys and values enter `kv`."""
        num_rows, num_heads = first_position_B.shape[0], self.num_heads + 2 * self.num_kv_heads
        qkv_BTGC = self.qkv(normed_ND).view(num_rows, -1, num_heads, self.head_dim)
        tables = AttentionTables(self.position_PHC, self.position_bias_PH, self.bias_u_HC)
        mixed = paged_rel_attention(qkv_BTGC, kv, tables, first_position_B)
        change_ND: Tensor = self.project(mixed.reshape(-1, self.project.in_features))
        return change_ND
