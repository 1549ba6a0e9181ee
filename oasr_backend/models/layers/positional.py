"""Sinusoidal positions (Vaswani et al., 2017, section 3.5), sine and cosine interleaved."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoid_table(num_positions: int, model_dim: int) -> Tensor:
    """Positions 0 .. num_positions-1 as a float32 table (num_positions, model_dim).

    Columns 2i and 2i+1 hold sin and cos of position / 10000^(2i / model_dim).
    """
    position_P1 = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1)
    rate_D = torch.exp(
        torch.arange(0, model_dim, 2, dtype=torch.float32) * -(math.log(10000.0) / model_dim)
    )
    table_PD = torch.empty(num_positions, model_dim)
    table_PD[:, 0::2] = torch.sin(position_P1 * rate_D)
    table_PD[:, 1::2] = torch.cos(position_P1 * rate_D[: model_dim // 2])
    return table_PD
