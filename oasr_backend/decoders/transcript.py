"""What a search that keeps one hypothesis a row has heard of it, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oasr_backend.decoders.arrays import more_rows
from oasr_backend.decoders.chunk import Tail
from oasr_backend.types import Hypothesis


@dataclass(slots=True)
class Transcript:
    """Tokens with their frames and log-probs."""

    tokens: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add(self, token: int, time: int, log_prob: float) -> None:
        self.tokens.append(token)
        self.times.append(time)
        self.log_probs.append(log_prob)


class Transcripts:
    """One hypothesis a row, none of whose tokens ever changes: most of a `Search`.

    `scores_R` are the sums of the paths' log-probs over all frames; the search adds to them.
    """

    def __init__(self) -> None:
        self.scores_R = np.empty(0, dtype=np.float64)
        self._rows: list[Transcript] = []

    def __getitem__(self, row: int) -> Transcript:
        return self._rows[row]

    def grow(self, num_rows: int) -> None:
        self.scores_R = more_rows(self.scores_R, num_rows)
        self._rows.extend(Transcript() for _ in range(num_rows - len(self._rows)))

    def reset_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.scores_R[row] = 0.0
            self._rows[row] = Transcript()

    def num_stable(self, row: int) -> int:
        return len(self._rows[row].tokens)

    def tail(self, row: int, skip: int) -> Tail:
        tokens = self._rows[row].tokens
        return Tail(tokens[skip:], len(tokens))

    def hypothesis(self, row: int, *, skip: int = 0) -> Hypothesis:
        """Without its first `skip` tokens, under the score of the whole."""
        transcript = self._rows[row]
        return Hypothesis(
            tuple(transcript.tokens[skip:]),
            float(self.scores_R[row]),
            times=tuple(transcript.times[skip:]),
            token_log_probs=tuple(transcript.log_probs[skip:]),
        )
