"""Weighted averages of neighbouring frames.

Shape letters: s frames of one average, N averages, M = N * s frames, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.traced import static


def average_frames(x_MD: Tensor, share_s: Tensor) -> Tensor:
    """(M, D) to (N, D), summed in float32 at least."""
    if not use_kernel(x_MD):
        return average_frames_definition(x_MD, share_s)
    from oasr_backend.kernels.average_kernel import launch_average_frames

    return launch_average_frames(x_MD, share_s)


def average_frames_definition(x_MD: Tensor, share_s: Tensor) -> Tensor:
    width = static(x_MD.shape[1])
    x_NsD = x_MD.view(-1, static(share_s.shape[0]), width)
    return torch.matmul(share_s.view(1, 1, -1), x_NsD).view(-1, width)
