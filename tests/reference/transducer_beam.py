"""Modified beam search of a stateless transducer: one stream, one path and one frame at a time.

A dictionary from the tokens of a path to its log-prob, times and token log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from oasr_backend.decoders.transducer.network import TransducerNetwork
from tests.reference.ctc import log_add

Tokens = tuple[int, ...]


class PlainPath(NamedTuple):
    score: float
    times: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()


def no_bonus(_: Tokens) -> float:
    return 0.0


class PlainTransducerBeam:
    """`bonus` is added to a path's score where pairs are ranked, and nowhere else.

    `width` best units of a path may extend it; all when None.
    """

    def __init__(
        self,
        network: TransducerNetwork,
        beam: int,
        *,
        width: int | None = None,
        bonus: Callable[[Tokens], float] = no_bonus,
    ) -> None:
        self.network, self.beam, self.width, self.bonus = network, beam, width, bonus
        self.paths: dict[Tokens, PlainPath] = {(): PlainPath(0.0)}
        self.num_frames = 0

    def frame(self, frame_J: Tensor) -> None:
        pairs = []
        for tokens, path in self.paths.items():
            log_probs_V = self.log_probs(frame_J, tokens)
            units = sorted(range(len(log_probs_V)), key=lambda unit: -log_probs_V[unit])
            for unit in units[: self.width]:
                grown = tokens if unit == self.network.blank_id else (*tokens, unit)
                score = path.score + log_probs_V[unit]
                pairs.append((score + self.bonus(grown), score, tokens, unit, log_probs_V[unit]))
        pairs.sort(key=lambda pair: -pair[0])
        grown_paths: dict[Tokens, PlainPath] = {}
        for _, score, tokens, unit, log_prob in pairs[: self.beam]:
            path = self.paths[tokens]._replace(score=score)
            if unit != self.network.blank_id:
                tokens = (*tokens, unit)
                times, log_probs = (*path.times, self.num_frames), (*path.log_probs, log_prob)
                path = PlainPath(score, times, log_probs)
            if tokens in grown_paths:
                first = grown_paths[tokens]
                path = first._replace(score=log_add(first.score, score))
            grown_paths[tokens] = path
        self.paths = grown_paths
        self.num_frames += 1

    def log_probs(self, frame_J: Tensor, tokens: Tokens) -> list[float]:
        context = (*self.network.start_context, *tokens)[-self.network.context_size :]
        predicted_1J = self.network.predict(torch.tensor([context], device=frame_J.device))
        logits_1V = self.network.logits(frame_J[None], predicted_1J)
        log_probs: list[float] = logits_1V[0].log_softmax(-1).tolist()
        return log_probs

    def nbest(
        self, final_bonus: Callable[[Tokens], float] = no_bonus
    ) -> list[tuple[Tokens, PlainPath]]:
        """Paths by score per token, the start context counted too; scores with what ends give."""
        ended = [
            (tokens, path._replace(score=path.score + final_bonus(tokens)))
            for tokens, path in self.paths.items()
            if path.score > -math.inf
        ]
        length = self.network.context_size
        return sorted(ended, key=lambda item: -item[1].score / (len(item[0]) + length))
