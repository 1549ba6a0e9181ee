"""Position-wise feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


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
        change_BTD: Tensor = self.contract(self.activation(self.expand(normed_BTD)))
        return change_BTD
