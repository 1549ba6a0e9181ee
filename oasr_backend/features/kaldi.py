"""Kaldi's log-mel features with global statistics, as WeNet trains on them."""

from __future__ import annotations

from torch import Tensor

from oasr_backend.errors import ConfigError
from oasr_backend.features.base import Frontend
from oasr_backend.features.cmvn import GlobalCmvn
from oasr_backend.features.fbank import LogMelFilterbank


class KaldiFrontend(Frontend):
    """A filterbank and, where there are statistics, their normalisation."""

    def __init__(self, filterbank: LogMelFilterbank, cmvn: GlobalCmvn | None = None) -> None:
        """Raises ConfigError for statistics of another number of bins."""
        super().__init__(filterbank.config.geometry)
        if cmvn is not None and cmvn.num_bins != self.geometry.num_bins:
            raise ConfigError(
                f"the statistics have {cmvn.num_bins} bins, and the features have "
                f"{self.geometry.num_bins}; take both from one training"
            )
        self.filterbank = filterbank
        self.cmvn = cmvn

    def features(self, samples_BS: Tensor) -> Tensor:
        features_BWF: Tensor = self.filterbank(samples_BS)
        return features_BWF

    def normalise(self, features_BWF: Tensor) -> Tensor:
        if self.cmvn is None:
            return features_BWF
        normal_BWF: Tensor = self.cmvn(features_BWF)
        return normal_BWF
