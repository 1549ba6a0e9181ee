"""Obvious CTC searches, one stream and one frame at a time, in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Prefix = tuple[int, ...]
LOG_ZERO = -math.inf


def log_add(a: float, b: float) -> float:
    if a == LOG_ZERO or b == LOG_ZERO:
        return max(a, b)
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


def greedy(log_probs_TV: npt.NDArray[np.floating], blank: int = 0) -> tuple[list[int], list[int]]:
    """The tokens, and the first frame of each."""
    tokens: list[int] = []
    times: list[int] = []
    previous = blank
    for frame, best in enumerate(log_probs_TV.argmax(1).tolist()):
        if best not in (blank, previous):
            tokens.append(best)
            times.append(frame)
        previous = best
    return tokens, times


class PrefixBeam:
    """Prefix beam search with a dictionary from prefix to its (blank, token) pair of log-probs."""

    def __init__(
        self,
        beam: int = 10,
        width: int = 10,
        *,
        blank: int = 0,
        threshold: float = 1.0,
        bonus: Callable[[Prefix], float] = lambda _: 0.0,
    ) -> None:
        """`bonus` is added to a prefix's score where prefixes are ranked, and nowhere else."""
        self.beam, self.width, self.blank, self.threshold = beam, width, blank, threshold
        self.bonus = bonus
        self.prefixes: dict[Prefix, tuple[float, float]] = {(): (0.0, LOG_ZERO)}

    def frame(self, log_probs_V: npt.NDArray[np.floating]) -> None:
        if self.threshold < 1.0 and math.exp(log_probs_V[self.blank]) > self.threshold:
            self.prefixes = {p: (log_add(*pair), LOG_ZERO) for p, pair in self.prefixes.items()}
            return
        grown: dict[Prefix, list[float]] = defaultdict(lambda: [LOG_ZERO, LOG_ZERO])
        best = np.argsort(-log_probs_V, kind="stable")[: self.width].tolist()
        for prefix, (ends_in_blank, ends_in_token) in self.prefixes.items():
            total = log_add(ends_in_blank, ends_in_token)
            for token in best:
                log_prob = float(log_probs_V[token])
                if token == self.blank:
                    _add(grown[prefix], 0, total + log_prob)
                elif prefix and token == prefix[-1]:
                    _add(grown[prefix], 1, ends_in_token + log_prob)
                    _add(grown[(*prefix, token)], 1, ends_in_blank + log_prob)
                else:
                    _add(grown[(*prefix, token)], 1, total + log_prob)
        ranked = sorted(grown.items(), key=lambda item: -(log_add(*item[1]) + self.bonus(item[0])))
        self.prefixes = {prefix: (pair[0], pair[1]) for prefix, pair in ranked[: self.beam]}

    def nbest(self) -> list[tuple[Prefix, float]]:
        """Prefixes with a score above zero probability, best first."""
        scored = [(prefix, log_add(*pair)) for prefix, pair in self.prefixes.items()]
        return [(prefix, score) for prefix, score in scored if score > LOG_ZERO]


def _add(pair: list[float], which: int, log_prob: float) -> None:
    pair[which] = log_add(pair[which], log_prob)


def prefix_beam(
    log_probs_TV: npt.NDArray[np.floating],
    beam: int = 10,
    width: int = 10,
    *,
    threshold: float = 1.0,
) -> list[tuple[Prefix, float]]:
    search = PrefixBeam(beam, width, threshold=threshold)
    for log_probs_V in log_probs_TV:
        search.frame(log_probs_V)
    return search.nbest()


def best_alignment(
    log_probs_TV: npt.NDArray[np.floating], tokens: Sequence[int], blank: int = 0
) -> tuple[float, list[int]]:
    """Forced alignment: log-prob of the best path for `tokens`, and each token's first frame."""
    labels = [blank]
    for token in tokens:
        labels += [token, blank]
    score = np.full(len(labels), LOG_ZERO)
    score[:2] = [log_probs_TV[0, label] for label in labels[:2]]
    origins = []
    for log_probs_V in log_probs_TV[1:]:
        origin = [_best_step(score, labels, s) for s in range(len(labels))]
        origins.append(origin)
        score = score[origin] + log_probs_V[labels]
    last = int(np.argmax(score[-2:])) + max(0, len(labels) - 2)
    path = [last]
    for origin in reversed(origins):
        path.append(origin[path[-1]])
    path.reverse()
    return float(score[last]), [path.index(2 * k + 1) for k in range(len(tokens))]


def _best_step(score: npt.NDArray[np.floating], labels: list[int], state: int) -> int:
    """A label is reached from itself, the one before, or past a blank from an unlike token."""
    may_skip_blank = state % 2 == 1 and state > 1 and labels[state] != labels[state - 2]
    steps = [s for s in (state, state - 1, state - 2)[: 3 if may_skip_blank else 2] if s >= 0]
    return max(steps, key=lambda s: score[s])
