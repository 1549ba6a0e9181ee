"""What may favour some prefixes over others, beside the acoustic scores.

A scorer gives every prefix a state, a number that the search carries along and does not read, and
a gain for each token that extends it. Acoustic scores stay as they are: the gains add up in a
column of their own, which only the ranking sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from oasr_backend.decoders.arrays import IntArray

#: What a scorer needs of candidates, each of their shape.
Looked = tuple[torch.Tensor, ...]


class ChunkScorer(Protocol):
    """A scorer that knows the rows of a chunk.

    Candidates are unit ids (N, A, C) of the first N rows: A is 1 where a row's prefixes share them,
    and B where each prefix has its own. An id of -1 stands for no unit; what it gives is not read.
    """

    def look_up(self, id_XNAC: torch.Tensor) -> Looked:
        """What `extend` needs of candidates, whatever the prefixes; for many frames X at once."""

    def extend(self, looked: Looked, state_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(gain, next state), each (N, B, C), of one frame's candidates. Gains are float64."""

    def settle(self, state_NB: torch.Tensor) -> torch.Tensor:
        """What a prefix gains if nothing follows it: (N, B), float64, mostly taken back."""


class PrefixScorer(Protocol):
    @property
    def initial_state(self) -> int: ...

    def for_chunk(self, rows: IntArray) -> ChunkScorer: ...


class Gains(NamedTuple):
    """What the candidates of one frame would bring."""

    bonus_NBC: torch.Tensor
    state_KNBC: torch.Tensor

    def picked(self, pick_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(bonus (1, N, B), state (K, N, B)) at places slot * C + column."""
        places_KNB = pick_NB.expand(len(self.state_KNBC), -1, -1)
        state_KNB = self.state_KNBC.flatten(2).gather(2, places_KNB)
        return self.bonus_NBC.flatten(1).gather(1, pick_NB)[None], state_KNB


class Candidates(NamedTuple):
    """Candidates as each scorer looked them up, and which of them leave a prefix as it is."""

    stays_XNAC: torch.Tensor
    looked: Sequence[Looked]

    def frame(self, frame: int, num_rows: int) -> Candidates:
        """One of many frames, and its first rows."""
        looked = [tuple(values[frame, :num_rows] for values in one) for one in self.looked]
        return Candidates(self.stays_XNAC[frame, :num_rows], looked)


class ChunkBias:
    """All scorers of a search for one chunk; state k belongs to scorer k."""

    def __init__(self, scorers: Sequence[PrefixScorer], rows: IntArray) -> None:
        self._scorers = [scorer.for_chunk(rows) for scorer in scorers]

    def look_up(self, id_XNAC: torch.Tensor) -> Candidates:
        """Candidates of one frame or of many; -1 stands for a prefix that stays as it is."""
        looked = [scorer.look_up(id_XNAC) for scorer in self._scorers]
        return Candidates(id_XNAC < 0, looked)

    def extend(
        self, candidates: Candidates, bonus_1NB: torch.Tensor, state_KNB: torch.Tensor
    ) -> Gains:
        """Of one frame's candidates."""
        pairs = zip(self._scorers, candidates.looked, state_KNB, strict=True)
        found = [scorer.extend(looked, state_NB) for scorer, looked, state_NB in pairs]
        gain_NBC = torch.stack([gain for gain, _ in found]).sum(0)
        next_KNBC = torch.stack([state for _, state in found])
        gain_NBC = gain_NBC.masked_fill(candidates.stays_XNAC, 0.0)
        next_KNBC = torch.where(candidates.stays_XNAC, state_KNB[..., None], next_KNBC)
        return Gains(bonus_1NB[0][..., None] + gain_NBC, next_KNBC)

    def settle(self, state_KNB: torch.Tensor) -> torch.Tensor:
        pairs = zip(self._scorers, state_KNB, strict=True)
        return torch.stack([scorer.settle(state_NB) for scorer, state_NB in pairs]).sum(0)
