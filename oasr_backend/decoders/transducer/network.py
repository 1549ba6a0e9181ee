"""What the searches over a transducer ask of its predictor and joiner.

Shapes: N rows (streams or paths), C tokens of context, J joiner, V vocabulary with the blank.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TransducerNetwork(Protocol):
    """Scores of the next token, given a frame and the tokens before it.

    context_size   tokens that the predictor reads
    blank_id       the unit that stands for "nothing"
    start_context  what it reads at the start of a stream: -1 for "no token", then blank
    blank_penalty  what `logits` takes off blank's
    """

    context_size: int
    blank_id: int
    blank_penalty: float

    @property
    def start_context(self) -> tuple[int, ...]:
        """`context_size` of them."""

    def predict(self, context_NC: Tensor) -> Tensor:
        """(N, C) int64 tokens, the newest last, to (N, J). -1 counts as a zero embedding."""

    def logits(self, frames_NJ: Tensor, predicted_NJ: Tensor) -> Tensor:
        """Projected frames and what `predict` gave to (N, V), in the weights' dtype."""
