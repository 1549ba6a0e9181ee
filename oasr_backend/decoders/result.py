"""What a decoder gives for one stream state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oasr_backend.types import Hypothesis


@dataclass(frozen=True)
class GpuDecoderResult:
    """Hypotheses per batch entry, best first; every list is indexed [batch][n].

    `times` are encoder frames since the start of the stream, one per token; `token_log_probs` are
    the tokens' log-probs at their best frame.
    """

    tokens: list[list[list[int]]]
    scores: list[list[float]]
    times: list[list[list[int]]]
    token_log_probs: list[list[list[float]]]

    @classmethod
    def from_hypotheses(cls, batch: Sequence[Sequence[Hypothesis]]) -> GpuDecoderResult:
        return cls(
            tokens=[[list(h.tokens) for h in nbest] for nbest in batch],
            scores=[[h.score for h in nbest] for nbest in batch],
            times=[[list(h.times) for h in nbest] for nbest in batch],
            token_log_probs=[[list(h.token_log_probs) for h in nbest] for nbest in batch],
        )

    def best(self, entry: int = 0) -> list[int]:
        """Tokens of the best hypothesis of one batch entry."""
        return self.tokens[entry][0]
