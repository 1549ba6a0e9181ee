"""Changes of a tensor's type that leave no node in a graph where nothing changes."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """`x` in float32, or as it is where it is that wide already."""
    return x if x.dtype == torch.float64 else cast(x, torch.float32)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)
