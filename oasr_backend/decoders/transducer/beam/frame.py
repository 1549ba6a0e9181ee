"""One frame of the modified beam search for N beams: tensor operations of fixed shapes only.

Shapes: N rows, B paths of a beam, W candidates of a path, P = B * W, I integers and C context
tokens of a path, K scorers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oasr_backend.decoders.bias.base import Gains

LOG_ZERO = float("-inf")
_EMPTY_HASH = 0x2545F4914F6CDD1D
_HASH_FACTOR = 0x5851F42D4C957F2D
_TOKEN_FACTOR = -0x61C8864680B583EB
_HASH, _LENGTH, _CONTEXT = 0, 1, 2


class PathBeams(NamedTuple):
    """N beams of B paths. A slot without a path has the score -inf, and nothing else of it counts.

    `ints_INB` stacks each path's hash, its number of tokens and the predictor's context. Bonus and
    states are those of the K scorers; 0 and nothing without any.
    """

    score_1NB: Tensor  # log-prob of all alignments that were kept, float64
    ints_INB: Tensor
    bonus_1NB: Tensor
    state_KNB: Tensor

    @property
    def num_tokens(self) -> Tensor:
        """(N, B) int64."""
        return self.ints_INB[_LENGTH]

    @property
    def contexts(self) -> Tensor:
        """(N * B, C) int64, row after row."""
        return self.ints_INB[_CONTEXT:].flatten(1).t()


class PathCandidates(NamedTuple):
    """The W best units of each path in a frame, blank among them like any other."""

    log_prob_NBW: Tensor
    id_NBW: Tensor


class PathRecord(NamedTuple):
    """What the trace of a frame is made from."""

    log_prob_NP: Tensor
    pick_NB: Tensor  # slot * W + candidate
    slot_NB: Tensor
    token_NB: Tensor


def fresh_paths(beam: int, start_context: Sequence[int], states: Sequence[int] = ()) -> PathBeams:
    """One row at the start of a stream: the path without tokens in slot 0, none in the others."""
    score_11B = torch.full((1, 1, beam), LOG_ZERO, dtype=torch.float64)
    score_11B[0, 0, 0] = 0.0
    return PathBeams(
        score_11B,
        _in_every_slot((_EMPTY_HASH, 0, *start_context), beam),
        torch.zeros((1, 1, beam), dtype=torch.float64),
        _in_every_slot(states, beam),
    )


def _in_every_slot(values: Sequence[int], beam: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)[:, None, None].repeat(1, 1, beam)


def best_units(logits_XV: Tensor, beam: int, width: int) -> PathCandidates:
    """Log-probs in float32, or in the logits' type where that is finer. X = N * B."""
    dtype = torch.promote_types(logits_XV.dtype, torch.float32)
    best_XW, id_XW = logits_XV.log_softmax(-1, dtype=dtype).topk(width, dim=-1)
    shape = (-1, beam, width)
    return PathCandidates(best_XW.view(shape), id_XW.view(shape))


def path_step(
    beams: PathBeams, candidates: PathCandidates, blank_id: int, gains: Gains | None = None
) -> tuple[PathBeams, PathRecord]:
    """The best B of all pairs of path and unit; pairs that spell the same tokens become one.

    Of equal pairs the lower slot, then the lower candidate, comes first.
    """
    log_prob_NBW, id_NBW = candidates
    beam, width = id_NBW.shape[1:]
    total_NP = (beams.score_1NB[0][..., None] + log_prob_NBW).flatten(1)
    ranked_NP = total_NP if gains is None else total_NP + gains.bonus_NBC.flatten(1)
    best_NP, place_NP = ranked_NP.sort(dim=-1, descending=True, stable=True)
    pick_NB = place_NP[:, :beam]
    slot_NB = pick_NB // width
    token_NB = id_NBW.flatten(1).gather(1, pick_NB)
    ints_INB = _extended(beams.ints_INB, slot_NB, token_NB, blank_id)
    score_NB = best_NP[:, :beam] if gains is None else total_NP.gather(1, pick_NB)
    # Equal token sequences have earned the same bonus and are in the same states.
    bias = (beams.bonus_1NB, beams.state_KNB) if gains is None else gains.picked(pick_NB)
    picked = PathBeams(_merged(score_NB, ints_INB[_HASH])[None], ints_INB, *bias)
    return picked, PathRecord(log_prob_NBW.flatten(1), pick_NB, slot_NB, token_NB)


def _extended(ints_INB: Tensor, slot_NB: Tensor, token_NB: Tensor, blank_id: int) -> Tensor:
    """The picked paths' integers behind their tokens; int64 arithmetic wraps."""
    ints_INB = ints_INB.gather(2, slot_NB.expand(len(ints_INB), -1, -1))
    hash_NB = torch.add(ints_INB[_HASH] * _HASH_FACTOR, token_NB, alpha=_TOKEN_FACTOR)
    head_2NB = torch.stack((hash_NB, ints_INB[_LENGTH] + 1))
    longer_INB = torch.cat((head_2NB, ints_INB[_CONTEXT + 1 :], token_NB[None]))
    return torch.where(token_NB == blank_id, ints_INB, longer_INB)


def _merged(score_NB: Tensor, hash_NB: Tensor) -> Tensor:
    """Scores by falling rank; the second of two equal paths is -inf and counts in the first.

    Before the frame all paths differ, so that no three pairs spell the same: a path and blank, and
    its parent with its last token.
    """
    is_twin_NBB = (hash_NB[:, :, None] == hash_NB[:, None, :]).triu(1)
    twin_NBB = torch.where(is_twin_NBB, score_NB[:, None, :], LOG_ZERO)
    sum_NB = torch.logaddexp(score_NB, twin_NBB.amax(-1))
    return sum_NB.masked_fill(is_twin_NBB.any(1), LOG_ZERO)
