"""Causal convolution module of the Conformer (Gulati et al., 2020, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalConvolution(nn.Module):
    """Pre-norm gate -> depthwise convolution -> norm -> activation -> projection.

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
        self.kernel_size = kernel_size
        self.norm = nn.LayerNorm(model_dim, eps=norm_eps)
        self.gate = nn.Linear(model_dim, 2 * model_dim)
        self.depthwise = nn.Conv2d(model_dim, model_dim, (1, kernel_size), groups=model_dim)
        # Batch norm is folded into the depthwise weights when a checkpoint is loaded.
        self.inner_norm = nn.LayerNorm(model_dim, eps=norm_eps) if layer_norm else None
        self.project = nn.Linear(model_dim, model_dim)
        self.activation = activation
        self.register_buffer("rest_D", torch.zeros(model_dim))

    def forward(self, x_BTD: Tensor, state_BKD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x + module(x) and the next state (the last K-1 gated frames)."""
        gated_BTD = F.glu(self.gate(self.norm(x_BTD)), dim=-1) - self.rest_D
        window_BSD = torch.cat((state_BKD, gated_BTD), dim=1)
        # (B, S, D) read as channels-last (B, D, 1, S): the depthwise kernel needs no transposition.
        mixed_BTD = self.depthwise(window_BSD.unsqueeze(1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        mixed_BTD = mixed_BTD.squeeze(1)
        if self.inner_norm is not None:
            mixed_BTD = self.inner_norm(mixed_BTD)
        return x_BTD + self.project(self.activation(mixed_BTD)), window_BSD[:, x_BTD.shape[1] :]
