"""A transducer with a stateless predictor, one path and one frame at a time, in float64.

Shapes: T frames, J joiner, E embedding, C context, V vocabulary, G channels of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


class Found(NamedTuple):
    """Each token's frame and log-prob, and the sum of the log-probs of all frames."""

    tokens: list[int]
    times: list[int]
    log_probs: list[float]
    score: float


class Transducer:
    def __init__(self, weights: Mapping[str, npt.ArrayLike], blank: int = 0) -> None:
        """`weights` by icefall's keys."""
        self._of = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
        self.blank = blank
        conv = self._of.get("decoder.conv.weight")
        self.context_size = 1 if conv is None else conv.shape[2]

    def project(self, encoded_TD: npt.ArrayLike) -> Float64:
        return self._linear("joiner.encoder_proj", np.asarray(encoded_TD, np.float64))

    def predict(self, context: list[int]) -> Float64:
        embedding_VE = self._of["decoder.embedding.weight"]
        width = embedding_VE.shape[1]
        heard = [np.zeros(width) if one == -1 else embedding_VE[one] for one in context]
        if "decoder.conv.weight" in self._of:
            kernel_EGC = self._of["decoder.conv.weight"]
            group = kernel_EGC.shape[1]
            summed_E = np.zeros(width)
            for output in range(width):
                first = output // group * group
                for place, one_E in enumerate(heard):
                    part_G = one_E[first : first + group]
                    summed_E[output] += kernel_EGC[output, :, place] @ part_G
            return self._linear("joiner.decoder_proj", np.maximum(summed_E, 0))
        return self._linear("joiner.decoder_proj", heard[0])

    def log_probs(self, frame_J: Float64, context: list[int], penalty: float = 0.0) -> Float64:
        sum_J = np.tanh(frame_J + self.predict(context))
        logits_V = self._linear("joiner.output_linear", sum_J)
        logits_V[self.blank] -= penalty
        top = logits_V.max()
        return np.asarray(logits_V - top - np.log(np.exp(logits_V - top).sum()))

    def start(self) -> list[int]:
        return [-1] * (self.context_size - 1) + [self.blank]

    def greedy(self, encoded_TD: npt.ArrayLike, penalty: float = 0.0) -> Found:
        context = self.start()
        found = Found([], [], [], 0.0)
        for time, frame_J in enumerate(self.project(encoded_TD)):
            log_probs_V = self.log_probs(frame_J, context, penalty)
            best = int(log_probs_V.argmax())
            log_prob = float(log_probs_V[best])
            found = found._replace(score=found.score + log_prob)
            if best != self.blank:
                found.tokens.append(best)
                found.times.append(time)
                found.log_probs.append(log_prob)
                context = [*context[1:], best]
        return found

    def _linear(self, name: str, x_XD: Float64) -> Float64:
        return np.asarray(x_XD @ self._of[f"{name}.weight"].T + self._of[f"{name}.bias"])
