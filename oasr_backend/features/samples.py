"""The two types of samples, and the way from one to the other."""

from __future__ import annotations

from typing import cast

import numpy as np

from oasr_backend.types import Pcm16, Samples

FLOAT32 = np.dtype(np.float32)
PCM16 = np.dtype(np.int16)
PCM16_SCALE = np.float32(1.0 / 32768.0)


def as_float32(samples_S: Samples | Pcm16) -> Samples:
    """Samples in [-1, 1], exactly: the dtype alone decides the scale. Float32: the argument."""
    if samples_S.dtype == PCM16:
        return np.multiply(samples_S, PCM16_SCALE, dtype=np.float32)
    return cast(Samples, samples_S)
