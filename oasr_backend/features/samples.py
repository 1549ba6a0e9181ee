"""The two types of samples, and the way from one to the other."""

from __future__ import annotations

from typing import cast

import numpy as np

from oasr_backend.errors import StreamStateError
from oasr_backend.types import Pcm16, Samples

FLOAT32 = np.dtype(np.float32)
PCM16 = np.dtype(np.int16)
PCM16_SCALE = np.float32(1.0 / 32768.0)


def check_samples(samples_S: Samples | Pcm16) -> None:
    """Raises StreamStateError unless they are of one of the two types, in one dimension."""
    if samples_S.ndim != 1 or samples_S.dtype not in (FLOAT32, PCM16):
        raise StreamStateError(
            f"samples are {samples_S.dtype} of shape {samples_S.shape}; "
            "pass one-dimensional float32 or int16"
        )


def as_float32(samples_S: Samples | Pcm16) -> Samples:
    """Samples in [-1, 1], exactly: the dtype alone decides the scale. Float32: the argument."""
    if samples_S.dtype == PCM16:
        return np.multiply(samples_S, PCM16_SCALE, dtype=np.float32)
    return cast(Samples, samples_S)
