"""What a front end is: the features of one toolkit, and how it normalises them.

Shapes: B streams, S samples, W feature frames of a window, F features a frame.
"""

from __future__ import annotations

from torch import Tensor, nn

from oasr_backend.features.geometry import FrameGeometry


class Frontend(nn.Module):
    """Samples in [-1, 1] to the features that an encoder reads, in float32.

    A family writes `features` and, where it normalises, `normalise`. Both work on whole batches,
    keep nothing between two calls and have no shape that depends on a value, so that a step can be
    captured as a CUDA graph.
    """

    #: What a frame is. Windows and times follow from it.
    geometry: FrameGeometry

    def __init__(self, geometry: FrameGeometry) -> None:
        super().__init__()
        self.geometry = geometry

    def features(self, samples_BS: Tensor) -> Tensor:
        """(B, S) samples to (B, W, F) features before normalisation; W = geometry.num_frames(S)."""
        raise NotImplementedError(f"{type(self).__name__} has no features")

    def normalise(self, features_BWF: Tensor) -> Tensor:
        """(B, W, F) features as the encoder was trained on; here as they are."""
        return features_BWF

    def forward(self, samples_BS: Tensor) -> Tensor:
        return self.normalise(self.features(samples_BS))
