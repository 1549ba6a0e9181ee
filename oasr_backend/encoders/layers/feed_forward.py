"""Position-wise feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

#: Frames whose hidden layer stays in the cache of a processor between its two products.
_SLICE_FRAMES = 4096


class FeedForward(nn.Module):
    """Two layers on normalised input. The residual's factor is part of the second's weights."""

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor],
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model_dim, eps=norm_eps)
        self.expand = nn.Linear(model_dim, hidden_dim)
        self.contract = nn.Linear(hidden_dim, model_dim)
        self.activation = activation

    def forward(self, normed_BTD: Tensor) -> Tensor:
        """What the block adds to the residual."""
        batch, num_frames, _ = normed_BTD.shape
        slice_rows = max(1, _SLICE_FRAMES // num_frames)
        if batch <= slice_rows:
            return self._change(normed_BTD)
        return torch.cat([self._change(part) for part in normed_BTD.split(slice_rows)])

    def _change(self, normed_BTD: Tensor) -> Tensor:
        change_BTD: Tensor = self.contract(self.activation(self.expand(normed_BTD)))
        return change_BTD
