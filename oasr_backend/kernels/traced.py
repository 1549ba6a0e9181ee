"""The operations as an exported graph holds them: few nodes, one of many operators where it can.

The same mathematics as the definitions, in another order of additions; a graph is compared with
the definitions before it serves. Letters are those of the modules that hold the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from oasr_backend.kernels.operands import AttentionTables, ConvolutionWeights, KeyValuePages


def is_traced() -> bool:
    """Whether the running code is being written down as a graph."""
    return bool(torch.onnx.is_in_onnx_export())


def static(size: int) -> int:
    """A size that the graph holds as a constant rather than reads from its inputs."""
    return int(size)


def constant(x: Tensor) -> Tensor:
    """`x`, which follows from weights alone, as a value of the graph and not as arithmetic."""
    return torch.from_numpy(x.detach().cpu().numpy().copy())


def paged_rel_attention_traced(
    qkv_BTGC: Tensor, kv: KeyValuePages, tables: AttentionTables, first_position_B: Tensor
) -> Tensor:
    """The bias u goes to the queries: (q + u) . (k + p) + (v - u) . p, the last from a table.

    That table has one row more, of -inf, for keys that are not seen, so that no layer masks
    anything. Returns (B, T, H, C), which its user flattens anyway.
    """
    heads, head_dim = static(tables.num_heads), static(qkv_BTGC.shape[3])
    kv_heads = (static(qkv_BTGC.shape[2]) - heads) // 2
    q_BTHC, k_BTHC, v_BTHC = qkv_BTGC.split((heads, kv_heads, kv_heads), dim=2)
    kv.write(k_BTHC, v_BTHC)
    k_BKHC, v_BKHC = kv.gather()
    if kv_heads < heads:
        k_BKHC = _repeat_heads(k_BKHC, heads // kv_heads)
        v_BKHC = _repeat_heads(v_BKHC, heads // kv_heads)
    position_BK = _key_positions(kv, tables, first_position_B)
    key_BKHC = k_BKHC + tables.position_PHC[position_BK]
    scale = 1 / math.sqrt(head_dim)
    bias_PH = (tables.position_bias_PH - (tables.position_PHC * tables.bias_u_HC).sum(-1)) * scale
    bias_XH1 = constant(F.pad(bias_PH, (0, 0, 0, 1), value=float("-inf")).unsqueeze(2))
    unseen = torch.tensor(static(bias_PH.shape[0]))
    bias_BKH1 = bias_XH1[torch.where(kv.layout.valid_BK, position_BK, unseen)]
    query_BHTC = (q_BTHC + tables.bias_u_HC).transpose(1, 2)
    score_BHTK = (query_BHTC @ key_BKHC.permute(0, 2, 3, 1)) * scale
    score_BHTK = score_BHTK + bias_BKH1.permute(0, 2, 3, 1)
    mixed_BHTC: Tensor = score_BHTK.softmax(dim=-1) @ v_BKHC.transpose(1, 2)
    return mixed_BHTC.transpose(1, 2)


def _repeat_heads(x_BKHC: Tensor, times: int) -> Tensor:
    """Each head `times` times in a row."""
    repeated = x_BKHC.unsqueeze(3).expand(-1, -1, -1, times, -1)
    return repeated.flatten(2, 3)


def _key_positions(kv: KeyValuePages, tables: AttentionTables, first_position_B: Tensor) -> Tensor:
    """(B, K) rows of the position tables; columns that are not seen may lie outside of them."""
    position_BK = first_position_B.unsqueeze(1) + torch.arange(kv.layout.num_frames)
    return position_BK.clamp(0, static(tables.position_PHC.shape[0]) - 1)


def gated_causal_convolution_traced(
    gate_BTE: Tensor,
    state_BKD: Tensor,
    weights: ConvolutionWeights,
    activation: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    value_BTD, gate_BTD = gate_BTE.split(static(gate_BTE.shape[2]) // 2, dim=-1)
    gated_BTD = value_BTD * gate_BTD.sigmoid() - weights.rest_D
    window_BSD = torch.cat((state_BKD, gated_BTD), dim=1)
    mixed_BDT = weights.depthwise(window_BSD.unsqueeze(1).permute(0, 3, 1, 2))
    mixed_BTD = mixed_BDT.permute(0, 2, 3, 1).squeeze(1)
    if weights.norm is not None:
        mixed_BTD = weights.norm(mixed_BTD)
    return activation(mixed_BTD), window_BSD[:, static(gate_BTE.shape[1]) :]


def swoosh_traced(x: Tensor, shift: float, offset: float, slope: float) -> Tensor:
    """By the operators that ONNX Runtime vectorises, which its Softplus is not: a quarter of it.

    softplus(y) = relu(y) - log(sigmoid(|y|)); the slope goes into a leaky relu. The sigmoid is at
    least 1 / 2, so that its logarithm is exact.
    """
    y = x - shift
    bent = F.leaky_relu(y, -slope / (1 - slope)) * (1 - slope)
    return bent - y.abs().sigmoid().log() - (offset + slope * shift)
