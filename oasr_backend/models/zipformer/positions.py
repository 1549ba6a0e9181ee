"""What a Zipformer knows of the distance between two frames.

The encoding squeezes a distance s into an angle (Yao et al., "Zipformer", 2024; icefall's formula):
    y = r * sign(s) * (ln(|s| + r) - ln r),  r = sqrt(P),    a = atan(2 pi y / P)
    cos(a), sin(a), cos(2a), sin(2a), ...    the last of the P values is 1 in place of its sine

Shape letters: S distances, P values of an encoding, M = P / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def distances(chunk: int, left: int) -> Tensor:
    """(S,) of each key from each query, float64, the farthest behind first: S = left + 2 chunk - 1.

    Row s belongs to a key that lies s - (left + chunk - 1) frames after the query.
    """
    return torch.arange(1 - left - chunk, chunk, dtype=torch.float64)


def encoded_distances(distance_S: Tensor, size: int) -> Tensor:
    """(S, P) float64 of distances that need not be whole; `size` is P, even."""
    root = math.sqrt(size)
    squeezed_S = distance_S.sign() * ((distance_S.abs() + root).log() - math.log(root)) * root
    angle_S = (squeezed_S * (2 * math.pi / size)).atan()
    turn_SM = angle_S.unsqueeze(1) * torch.arange(1, size // 2 + 1, dtype=torch.float64)
    encoded_SP = torch.stack((turn_SM.cos(), turn_SM.sin()), dim=2).flatten(1)
    encoded_SP[:, -1] = 1.0
    return encoded_SP
