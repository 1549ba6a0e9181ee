"""What a front end is: the features of one toolkit, and how it normalises them.

Shapes: B streams, S samples, W feature frames of a window, F features a frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oasr_backend.features.geometry import FrameGeometry


@dataclass(frozen=True)
class FeaturePadding:
    """What a family puts in the place of feature frames that no audio gave.

    value        in every bin of such a frame, before normalisation
    tail_frames  how many follow the last real one when a stream ends
    """

    value: float
    tail_frames: int


class Frontend(nn.Module):
    """Samples in [-1, 1] to the features that an encoder reads, in float32.

    A family writes `features` and, where it normalises, `normalise`. Both work on whole batches,
    keep nothing between two calls and have no shape that depends on a value, so that a step can be
    captured as a CUDA graph.
    """

    #: What a frame is. Windows and times follow from it.
    geometry: FrameGeometry
    #: None: a last window is filled up with silent samples.
    padding: FeaturePadding | None = None

    def __init__(self, geometry: FrameGeometry) -> None:
        super().__init__()
        self.geometry = geometry

    def features(self, samples_BS: Tensor) -> Tensor:
        """(B, S) samples to (B, W, F) features before normalisation; W = geometry.num_frames(S)."""
        raise NotImplementedError(f"{type(self).__name__} has no features")

    def pad(self, features_BWF: Tensor, num_real_B: Tensor) -> Tensor:
        """With the padding, if there is one, behind the first `num_real_B` frames of a window."""
        if self.padding is None:
            return features_BWF
        frame_W = torch.arange(features_BWF.shape[1], device=features_BWF.device)
        is_real_BW1 = (frame_W < num_real_B.unsqueeze(1)).unsqueeze(2)
        return torch.where(is_real_BW1, features_BWF, self.padding.value)

    def normalise(self, features_BWF: Tensor) -> Tensor:
        """(B, W, F) features as the encoder was trained on; here as they are."""
        return features_BWF

    def forward(self, samples_BS: Tensor) -> Tensor:
        """Of windows that are real to their ends."""
        return self.normalise(self.features(samples_BS))
