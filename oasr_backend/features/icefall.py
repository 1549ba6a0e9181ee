"""The features that icefall's Zipformer recipes train on, which are those of lhotse's Fbank.

Facts: lhotse's `FbankConfig(num_mel_bins=80)`, whose values Kaldi's fbank gives under the options
below, and the padding of icefall's `streaming_decode.py`. Features are not normalised.
"""

from __future__ import annotations

import math

from torch import Tensor

from oasr_backend.features.base import FeaturePadding, Frontend
from oasr_backend.features.fbank import FbankConfig, LogMelFilterbank

#: Samples stay in [-1, 1], and the mel range ends 400 Hz below the Nyquist frequency.
ICEFALL_FBANK = FbankConfig(audio_scale=1.0, high_freq=-400.0, snip_edges=False)
#: 13 frames that the last window lacks, and 30 to hear the last word; not the floor of silence,
#: which is the log of the float32 epsilon.
ICEFALL_PADDING = FeaturePadding(value=math.log(1e-10), tail_frames=13 + 30)


class IcefallFrontend(Frontend):
    """80 log-mel bins at 16 kHz; a stream ends in frames of log(1e-10)."""

    padding = ICEFALL_PADDING

    def __init__(self) -> None:
        super().__init__(ICEFALL_FBANK.geometry)
        self.filterbank = LogMelFilterbank(ICEFALL_FBANK)

    def features(self, samples_BS: Tensor) -> Tensor:
        features_BWF: Tensor = self.filterbank(samples_BS)
        return features_BWF
