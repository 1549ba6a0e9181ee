"""Any usual sample rate to the model's, a piece at a time."""

from __future__ import annotations

import numpy as np
import soxr

from oasr_backend.errors import InvalidRequestError, StreamStateError
from oasr_backend.features.samples import as_float32, check_samples
from oasr_backend.types import Pcm16, Samples

MIN_RATE_HZ = 8000
MAX_RATE_HZ = 48000


class StreamingResampler:
    """Band-limited, delay-compensated resampling of one mono stream.

    The output samples don't depend on how the input is cut. They lag the input by the filter's
    look-ahead (about 0.1 s from 8 kHz, less from higher rates) until `finish` returns the rest.
    Equal rates pass samples through untouched and without delay.
    """

    def __init__(self, input_rate: int, output_rate: int) -> None:
        """Rates in Hz. Raises InvalidRequestError outside 8000..48000."""
        for name, rate in (("input", input_rate), ("output", output_rate)):
            if not MIN_RATE_HZ <= rate <= MAX_RATE_HZ:
                raise InvalidRequestError(
                    f"{name} sample rate {rate} Hz is outside {MIN_RATE_HZ}..{MAX_RATE_HZ}; "
                    "resample at the source"
                )
        self.input_rate = input_rate
        self.output_rate = output_rate
        self._is_finished = False
        self._soxr = self._open() if input_rate != output_rate else None

    def accept(self, samples_S: Samples | Pcm16) -> Samples | Pcm16:
        """Returns the output samples that are now final, maybe none. Equal rates: the argument.

        Raises StreamStateError after `finish` and, where there is something to do, for another
        shape or dtype than one-dimensional float32 or int16.
        """
        if self._soxr is None and not self._is_finished:
            return samples_S
        return self._run(samples_S, is_last=False)

    def finish(self) -> Samples | Pcm16:
        """Returns the rest: all outputs together are the input's duration, rounded."""
        rest_S = self._run(np.empty(0, dtype=np.float32), is_last=True)
        self._is_finished = True
        return rest_S

    def _open(self) -> soxr.ResampleStream:
        return soxr.ResampleStream(
            self.input_rate, self.output_rate, 1, dtype="float32", quality=soxr.HQ
        )

    def _run(self, samples_S: Samples | Pcm16, *, is_last: bool) -> Samples | Pcm16:
        if self._is_finished:
            raise StreamStateError(
                f"{samples_S.size} samples arrived after the end of the stream; open a new stream"
            )
        if self._soxr is None:
            return samples_S
        check_samples(samples_S)
        output_S: Samples = self._soxr.resample_chunk(as_float32(samples_S), last=is_last)
        return output_S
