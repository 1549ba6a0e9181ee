"""Turns channels at any rate into mono float32 at 16 kHz, block by block."""

from __future__ import annotations

import numpy as np
import soxr

from oasr_client.downmix import Channels as Channels
from oasr_client.downmix import Downmix
from oasr_client.downmix import Mono as Mono
from oasr_client.errors import InvalidAudioError

SAMPLE_RATE_HZ = 16000
#: Below it speech is not intelligible and resampling multiplies a file; no recorder goes above.
MIN_FILE_RATE_HZ = 4000
MAX_FILE_RATE_HZ = 384000


class Converter:
    """Blocks of floats in [-1, 1] to mono at 16 kHz with soxr's HQ filter.

    The output doesn't depend on the blocks' borders. Raises InvalidAudioError for a rate outside
    4..384 kHz.
    """

    def __init__(self, sample_rate_hz: int) -> None:
        check_rate(sample_rate_hz)
        self._downmix = Downmix(sample_rate_hz)
        self._soxr = None
        if sample_rate_hz != SAMPLE_RATE_HZ:
            self._soxr = soxr.ResampleStream(
                sample_rate_hz, SAMPLE_RATE_HZ, 1, dtype="float32", quality="HQ"
            )

    @property
    def has_cancelled(self) -> bool:
        """Whether channels cancelled each other somewhere."""
        return self._downmix.has_cancelled

    def convert(self, samples_NC: Channels) -> Mono:
        """The samples that no later block can change; there may be none."""
        return self._resampled(self._downmix.mix(samples_NC), is_last=False)

    def finish(self) -> Mono:
        """The samples that are left at the end."""
        return self._resampled(self._downmix.finish(), is_last=True)

    def _resampled(self, mono_N: Mono, *, is_last: bool) -> Mono:
        if self._soxr is None:
            return mono_N
        mono_N = np.ascontiguousarray(mono_N, np.float32)
        return np.asarray(self._soxr.resample_chunk(mono_N, last=is_last), np.float32)


def check_rate(sample_rate_hz: int) -> None:
    if not MIN_FILE_RATE_HZ <= sample_rate_hz <= MAX_FILE_RATE_HZ:
        raise InvalidAudioError(
            f"the sample rate is {sample_rate_hz} Hz, expected {MIN_FILE_RATE_HZ} to "
            f"{MAX_FILE_RATE_HZ}; name the recording's own rate, or convert it to 16000 Hz"
        )
