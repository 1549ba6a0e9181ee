"""Causal convolution module of the Conformer (Gulati et al., 2020, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from oasr_backend.kernels import ConvolutionWeights, gated_causal_convolution


class CausalConvolution(nn.Module):
    """Gate -> depthwise convolution -> norm -> activation -> projection, on normalised input.

    The state holds the last kernel_size - 1 *gated* frames minus what the gate makes of a zero
    frame (`rest_D`). So an all-zero state is exactly the left padding of the offline model, and no
    frame passes the gate twice. The depthwise bias carries `rest_D` times the kernel's sum.
    """

    rest_D: Tensor

    def __init__(
        self,
        model_dim: int,
        kernel_size: int,
        *,
        activation: Callable[[Tensor], Tensor],
        norm_eps: float,
        layer_norm: bool,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model_dim, eps=norm_eps)
        self.gate = nn.Linear(model_dim, 2 * model_dim)
        self.depthwise = nn.Conv2d(model_dim, model_dim, (1, kernel_size), groups=model_dim)
        # Batch norm is folded into the depthwise weights when a checkpoint is loaded.
        self.inner_norm = nn.LayerNorm(model_dim, eps=norm_eps) if layer_norm else None
        self.project = nn.Linear(model_dim, model_dim)
        self.activation = activation
        self.register_buffer("rest_D", torch.zeros(model_dim))

    def forward(self, normed_ND: Tensor, state_BKD: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """What the module adds to the residual, and the next state."""
        weights = ConvolutionWeights(self.rest_D, self.depthwise, self.inner_norm)
        mixed_BTD, next_BKD = gated_causal_convolution(
            self.gate(normed_ND).view(num_rows, -1, self.gate.out_features),
            state_BKD,
            weights,
            activation=self.activation,
        )
        return self.project(mixed_BTD.reshape(-1, self.project.in_features)), next_BKD
