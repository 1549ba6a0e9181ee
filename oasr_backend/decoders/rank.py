"""By what the hypotheses of one stream are ordered: the higher, the better."""

from __future__ import annotations

from collections.abc import Callable

from oasr_backend.types import Hypothesis

Rank = Callable[[Hypothesis], float]


def by_score(hypothesis: Hypothesis) -> float:
    return hypothesis.score


def by_mean_score(num_start_tokens: int) -> Rank:
    """Score per token, where `num_start_tokens` that stand before every text count too."""

    def rank(hypothesis: Hypothesis) -> float:
        return hypothesis.score / (len(hypothesis.tokens) + num_start_tokens)

    return rank
