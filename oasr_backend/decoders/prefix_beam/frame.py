"""One frame of the prefix beam search for N beams: tensor operations of fixed shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from oasr_backend.decoders.bias.base import Gains

LOG_ZERO = float("-inf")
NO_TOKEN = -1
_HASH_FACTOR = 0x5851F42D4C957F2D
_EMPTY_HASH = 0x2545F4914F6CDD1D
_DEAD_HASH = 0x1234_5678_0000_0000
_NO_PARENT = -0x61C8864680B583EB


class FrameCandidates(NamedTuple):
    """The W best tokens of a frame in columns 1..W (C = 1 + W); column 0 stands for "stay".

    Log-probs are float64, -inf where a token cannot extend a prefix: blank, and column 0.
    """

    id_NC: torch.Tensor  # column 0: NO_TOKEN
    hash_NC: torch.Tensor
    extend_NC: torch.Tensor
    blank_N: torch.Tensor  # -inf when blank is not among the W best
    dead_31B: torch.Tensor  # `Beams.ints_3NB` of slots without a prefix

    def rows(self, count: int) -> FrameCandidates:
        """The first `count` rows."""
        if count == self.id_NC.shape[0]:
            return self
        return FrameCandidates(
            self.id_NC[:count],
            self.hash_NC[:count],
            self.extend_NC[:count],
            self.blank_N[:count],
            self.dead_31B,
        )


class Beams(NamedTuple):
    """N beams of B prefixes, best first. Axis "2": (sum over alignments, best alignment), float64.

    `ints_3NB` stacks each prefix's hash, the hash of its parent (the prefix without its last token)
    and its last token. Bonus and states are those of the K scorers; 0 and nothing without any.
    """

    blank_2NB: torch.Tensor
    token_2NB: torch.Tensor
    total_2NB: torch.Tensor
    ints_3NB: torch.Tensor
    bonus_1NB: torch.Tensor
    state_KNB: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.ints_3NB.shape[1]

    @property
    def beam(self) -> int:
        return self.ints_3NB.shape[2]

    def rows(self, start: int, stop: int) -> Beams:
        return Beams(*(x[:, start:stop] for x in self))


class Links(NamedTuple):
    """How the prefixes of a beam relate to each other and to a frame's candidates."""

    column_NB: torch.Tensor  # the candidate that repeats the prefix's last token, 0 for none
    last_log_prob_NB: torch.Tensor
    parent_NB: torch.Tensor  # the slot that holds the prefix's parent
    has_parent_NB: torch.Tensor  # False: `parent_NB` means nothing
    doubled_NB: torch.Tensor  # the parent ends in the same token


class Repeats(NamedTuple):
    """Alignments that end in a prefix's last token without making it longer."""

    held_2NB: torch.Tensor  # the last token goes on
    brought_2NB: torch.Tensor  # the parent's extension by it, which spells the same prefix
    merged_2NB: torch.Tensor


class FrameRecord(NamedTuple):
    """What the trace of a frame is made from: tensors of before the frame, and the picks."""

    ints_3NB: torch.Tensor
    blank_2NB: torch.Tensor
    token_2NB: torch.Tensor
    held_2NB: torch.Tensor
    brought_2NB: torch.Tensor
    parent_NB: torch.Tensor
    doubled_NB: torch.Tensor
    column_NB: torch.Tensor
    pick_NB: torch.Tensor  # slot * C + column


def find_links(beams: Beams, candidates: FrameCandidates) -> Links:
    hash_NB, parent_hash_NB, last_NB = beams.ints_3NB.unbind(0)
    is_last_NBC = last_NB[:, :, None] == candidates.id_NC[:, None, :]
    is_parent_NBB = parent_hash_NB[:, :, None] == hash_NB[:, None, :]
    # At most one entry of a row is true, so a weighted sum is its index: cheaper than argmax.
    column_NB = _weighted(is_last_NBC)
    parent_NB = _weighted(is_parent_NBB)
    return Links(
        column_NB=column_NB,
        last_log_prob_NB=candidates.extend_NC.gather(1, column_NB),
        parent_NB=parent_NB,
        has_parent_NB=is_parent_NBB.any(-1),
        doubled_NB=last_NB.gather(1, parent_NB) == last_NB,
    )


def _weighted(is_true_NBX: torch.Tensor) -> torch.Tensor:
    width = is_true_NBX.shape[-1]
    weight_X = torch.arange(width, dtype=torch.float32, device=is_true_NBX.device)
    return (is_true_NBX.float() @ weight_X).long()


def repeat_last(beams: Beams, links: Links) -> Repeats:
    log_prob_NB = links.last_log_prob_NB
    parent_2NB = links.parent_NB.expand(2, -1, -1)
    brought_2NB = torch.where(
        links.doubled_NB,
        beams.blank_2NB.gather(2, parent_2NB),
        beams.total_2NB.gather(2, parent_2NB),
    )
    brought_2NB = torch.where(links.has_parent_NB, brought_2NB + log_prob_NB, LOG_ZERO)
    held_2NB = beams.token_2NB + log_prob_NB
    merged_2NB = torch.empty_like(held_2NB)
    torch.logaddexp(held_2NB[0], brought_2NB[0], out=merged_2NB[0])
    torch.maximum(held_2NB[1], brought_2NB[1], out=merged_2NB[1])
    return Repeats(held_2NB, brought_2NB, merged_2NB)


def grow(beams: Beams, links: Links, candidates: FrameCandidates) -> torch.Tensor:
    """Log-probs (2, N, B, C) of every prefix extended by every candidate; column 0 is void.

    An extension that spells a prefix of the beam is -inf: it is counted there already.
    """
    grown_2NBC = beams.total_2NB[..., None] + candidates.extend_NC[:, None, :]
    # Only alignments that end in blank may add the last token again.
    doubled_2NB1 = (beams.blank_2NB + links.last_log_prob_NB)[..., None]
    grown_2NBC.scatter_(3, links.column_NB[..., None].expand(2, -1, -1, -1), doubled_2NB1)
    # Where the beam holds no such prefix, the mark falls on a column 0.
    place_NB = links.parent_NB * candidates.id_NC.shape[1] + links.column_NB
    place_2NB = place_NB.masked_fill(~links.has_parent_NB, 0).expand(2, -1, -1)
    grown_2NBC.flatten(2).scatter_(2, place_2NB, LOG_ZERO)
    return grown_2NBC


def pick_best(
    token_2NBC: torch.Tensor, stay_NB: torch.Tensor, gains: Gains | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Totals and places of the B best. Equal ones: lower slot, then lower column, first."""
    beam = stay_NB.shape[1]
    totals_NBC = token_2NBC[0].clone()
    totals_NBC[..., 0] = stay_NB
    ranked_NBC = totals_NBC if gains is None else totals_NBC + gains.bonus_NBC
    best_NP, place_NP = ranked_NBC.flatten(1).sort(dim=-1, descending=True, stable=True)
    place_NB = place_NP[:, :beam]
    if gains is None:
        return best_NP[:, :beam], place_NB
    return totals_NBC.flatten(1).gather(1, place_NB), place_NB


def beam_step(
    beams: Beams, candidates: FrameCandidates, gains: Gains | None = None
) -> tuple[Beams, FrameRecord]:
    links = find_links(beams, candidates)
    repeats = repeat_last(beams, links)
    blank_2NB = beams.total_2NB + candidates.blank_N[:, None]
    token_2NBC = grow(beams, links, candidates)
    stay_NB = torch.logaddexp(blank_2NB[0], repeats.merged_2NB[0])
    token_2NBC[..., 0] = repeats.merged_2NB
    best_NB, pick_NB = pick_best(token_2NBC, stay_NB, gains)
    columns = candidates.id_NC.shape[1]
    slot_NB, column_NB = pick_NB // columns, pick_NB % columns
    token_2NB = token_2NBC.flatten(2).gather(2, pick_NB.expand(2, -1, -1))
    stays_NB = column_NB == 0
    blank_2NB = blank_2NB.gather(2, slot_NB.expand(2, -1, -1))
    blank_2NB = torch.where(stays_NB, blank_2NB, LOG_ZERO)
    total_2NB = torch.stack((best_NB, torch.maximum(blank_2NB[1], token_2NB[1])))
    ints_3NB = beams.ints_3NB.gather(2, slot_NB.expand(3, -1, -1))
    ints_3NB = torch.where(stays_NB, ints_3NB, _children(ints_3NB[0], column_NB, candidates))
    # A slot that nothing alive fills must equal no prefix, or that prefix would come back twice.
    ints_3NB = torch.where(best_NB > LOG_ZERO, ints_3NB, candidates.dead_31B)
    bias = (beams.bonus_1NB, beams.state_KNB) if gains is None else gains.picked(pick_NB)
    picked = Beams(blank_2NB, token_2NB, total_2NB, ints_3NB, *bias)
    record = FrameRecord(
        ints_3NB=beams.ints_3NB,
        blank_2NB=beams.blank_2NB,
        token_2NB=beams.token_2NB,
        held_2NB=repeats.held_2NB,
        brought_2NB=repeats.brought_2NB,
        parent_NB=links.parent_NB,
        doubled_NB=links.doubled_NB,
        column_NB=links.column_NB,
        pick_NB=pick_NB,
    )
    return picked, record


def _children(
    parent_NB: torch.Tensor, column_NB: torch.Tensor, candidates: FrameCandidates
) -> torch.Tensor:
    """(hash, parent hash, last token) of prefixes extended by one token; int64 arithmetic wraps."""
    hash_NB = (parent_NB ^ candidates.hash_NC.gather(1, column_NB)) * _HASH_FACTOR
    return torch.stack((hash_NB, parent_NB, candidates.id_NC.gather(1, column_NB)))


def dead_slots(beam: int) -> torch.Tensor:
    """Hashes (3, 1, B) that no prefix has, different in each slot."""
    ints_31B = torch.full((3, 1, beam), NO_TOKEN, dtype=torch.int64)
    ints_31B[0, 0] = _DEAD_HASH + torch.arange(beam)
    ints_31B[1, 0] = _NO_PARENT
    return ints_31B


def fresh_beams(beam: int, states: Sequence[int] = ()) -> Beams:
    """One row at the start of a stream: the empty prefix in slot 0, nothing in the others."""
    dead_21B = torch.full((2, 1, beam), LOG_ZERO, dtype=torch.float64)
    empty_21B = dead_21B.clone()
    empty_21B[:, :, 0] = 0.0
    ints_31B = dead_slots(beam)
    ints_31B[0, 0, 0] = _EMPTY_HASH
    bonus_11B = torch.zeros((1, 1, beam), dtype=torch.float64)
    state_K1B = torch.tensor(states, dtype=torch.int64)[:, None, None].repeat(1, 1, beam)
    return Beams(empty_21B, dead_21B, empty_21B.clone(), ints_31B, bonus_11B, state_K1B)


def skip_rows(
    before: Beams, stepped: tuple[Beams, FrameRecord], skip_N: torch.Tensor, columns: int
) -> tuple[Beams, FrameRecord]:
    """Rows with `skip_N` keep their prefixes; the pair of each becomes (sum of both, nothing)."""
    after, record = stepped
    nothing_2NB = torch.full_like(before.total_2NB, LOG_ZERO)
    collapsed = before._replace(blank_2NB=before.total_2NB, token_2NB=nothing_2NB)
    skip_N1 = skip_N[:, None]
    kept = (torch.where(skip_N1, a, b) for a, b in zip(collapsed, after, strict=True))
    stay_B = torch.arange(before.beam, device=skip_N.device) * columns
    return Beams(*kept), record._replace(pick_NB=torch.where(skip_N1, stay_B, record.pick_NB))
