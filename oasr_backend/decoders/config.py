"""Settings of the CTC search, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from oasr_backend.decoders.base import CTC_SEARCHES
from oasr_backend.errors import ConfigError


@dataclass(frozen=True)
class GpuDecoderConfig:
    """Which search runs and how wide. Raises ConfigError for a setting that cannot be honoured.

    decoder           "greedy" takes the best token of each frame; "prefix_beam" sums alignments
    beam_size         prefixes kept per stream (prefix beam)
    token_candidates  best tokens of a frame that may extend a prefix, blank and repeats included
    blank_id          the token that stands for "nothing"
    blank_threshold   the prefix beam skips frames with P(blank) above it; 1.0 skips none
    nbest             hypotheses in a result, best first
    """

    decoder: str = "prefix_beam"
    beam_size: int = 10
    token_candidates: int = 10
    blank_id: int = 0
    blank_threshold: float = 1.0
    nbest: int = 1

    def __post_init__(self) -> None:
        if self.decoder not in CTC_SEARCHES:
            names = ", ".join(CTC_SEARCHES)
            raise ConfigError(f"decoder {self.decoder!r} is unknown; use one of: {names}")
        for name, least in (("beam_size", 1), ("token_candidates", 1), ("blank_id", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} {getattr(self, name)} is too small; use {least} or more")
        if not 0.0 < self.blank_threshold <= 1.0:
            raise ConfigError(
                f"blank_threshold {self.blank_threshold} is not in (0, 1]; 1.0 skips no frame"
            )
        self._check_nbest()

    def _check_nbest(self) -> None:
        most = CTC_SEARCHES[self.decoder].most_told(self.beam_size)
        if not 1 <= self.nbest <= most:
            raise ConfigError(
                f"nbest {self.nbest} is not in 1..{most}: {self.decoder} keeps {most} hypotheses "
                "per stream; lower nbest or raise beam_size with decoder prefix_beam"
            )
