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


class ChunkScorer(Protocol):
    """A scorer that knows the N rows and the candidates (T, N, C) of a chunk."""

    def extend(self, frame: int, state_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(gain, next state), each (N, B, C), for the first N rows. Column 0 is not read.

        Gains are float64.
        """

    def settle(self, state_NB: torch.Tensor) -> torch.Tensor:
        """What a prefix gains if nothing follows it: (N, B), float64, mostly taken back."""


class PrefixScorer(Protocol):
    @property
    def initial_state(self) -> int: ...

    def for_chunk(self, rows: IntArray, id_TNC: torch.Tensor) -> ChunkScorer: ...


class Gains(NamedTuple):
    """What the candidates of one frame would bring; column 0 brings nothing."""

    bonus_NBC: torch.Tensor
    state_KNBC: torch.Tensor

    def picked(self, pick_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(bonus (1, N, B), state (K, N, B)) at places slot * C + column."""
        places_KNB = pick_NB.expand(len(self.state_KNBC), -1, -1)
        state_KNB = self.state_KNBC.flatten(2).gather(2, places_KNB)
        return self.bonus_NBC.flatten(1).gather(1, pick_NB)[None], state_KNB


class ChunkBias:
    """All scorers of a search for one chunk; state k belongs to scorer k."""

    def __init__(
        self, scorers: Sequence[PrefixScorer], rows: IntArray, id_TNC: torch.Tensor
    ) -> None:
        self._scorers = [scorer.for_chunk(rows, id_TNC) for scorer in scorers]

    def extend(self, frame: int, bonus_1NB: torch.Tensor, state_KNB: torch.Tensor) -> Gains:
        found = [
            scorer.extend(frame, state_NB)
            for scorer, state_NB in zip(self._scorers, state_KNB, strict=True)
        ]
        gain_NBC = torch.stack([gain for gain, _ in found]).sum(0)
        gain_NBC[..., 0] = 0.0
        next_KNBC = torch.stack([state for _, state in found])
        next_KNBC[..., 0] = state_KNB
        return Gains(bonus_1NB[0][..., None] + gain_NBC, next_KNBC)

    def settle(self, state_KNB: torch.Tensor) -> torch.Tensor:
        pairs = zip(self._scorers, state_KNB, strict=True)
        return torch.stack([scorer.settle(state_NB) for scorer, state_NB in pairs]).sum(0)
