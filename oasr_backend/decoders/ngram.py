"""Shallow fusion: an n-gram model over units adds its weighed log-probs to the beam's ranking.

Each prefix carries its history as a state. A unit that the history does not know is looked up
behind shorter and shorter ones, each step at the cost of a backoff weight (Katz, 1987): at most
order - 1 searches in a sorted table, each for all prefixes and candidates at once.
"""

from __future__ import annotations

import torch

from oasr_backend.decoders.arpa import NgramModel
from oasr_backend.decoders.base import IntArray


class NgramScorer:
    """Implements PrefixScorer. A prefix gains `weight` * ln P(unit | history) + `unit_bonus`."""

    def __init__(
        self, model: NgramModel, *, weight: float, unit_bonus: float, device: torch.device
    ) -> None:
        """The bonus makes up for what every further unit costs, in favour of longer texts."""
        self.initial_state = model.initial_state
        self.order, self.vocab_size = model.order, model.vocab_size
        self.key_A = torch.from_numpy(model.key_A).to(device)
        self.next_A = torch.from_numpy(model.next_A).to(device)
        self.gain_A = torch.from_numpy(model.log_prob_A * weight + unit_bonus).to(device)
        self.gain_V = torch.from_numpy(model.unigram_V * weight + unit_bonus).to(device)
        self.next_V = torch.from_numpy(model.unigram_next_V).to(device)
        self.backoff_S = torch.from_numpy(model.backoff_S * weight).to(device)
        self.shorter_S = torch.from_numpy(model.shorter_S).to(device)

    def for_chunk(self, rows: IntArray, id_TNC: torch.Tensor) -> _ChunkNgrams:  # noqa: ARG002
        # Column 0 has no token; any valid one will do.
        return _ChunkNgrams(self, id_TNC.clamp(min=0))

    def look_up(
        self, state_NBC: torch.Tensor, id_NBC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gain, next state) of every unit behind every history."""
        gain_NBC, next_NBC = self.gain_V[id_NBC], self.next_V[id_NBC]
        cost_NBC = torch.zeros_like(gain_NBC)
        is_open_NBC = torch.ones_like(id_NBC, dtype=torch.bool)
        for _ in range(self.order - 1 if len(self.key_A) else 0):
            key_NBC = state_NBC * self.vocab_size + id_NBC
            place_NBC = torch.searchsorted(self.key_A, key_NBC).clamp(max=len(self.key_A) - 1)
            is_here_NBC = is_open_NBC & (state_NBC > 0) & (self.key_A[place_NBC] == key_NBC)
            gain_NBC = torch.where(is_here_NBC, self.gain_A[place_NBC], gain_NBC)
            next_NBC = torch.where(is_here_NBC, self.next_A[place_NBC], next_NBC)
            is_open_NBC = is_open_NBC & ~is_here_NBC
            cost_NBC = cost_NBC + self.backoff_S[state_NBC] * is_open_NBC
            state_NBC = self.shorter_S[state_NBC]
        return gain_NBC + cost_NBC, next_NBC


class _ChunkNgrams:
    """Implements ChunkScorer."""

    def __init__(self, scorer: NgramScorer, id_TNC: torch.Tensor) -> None:
        self._scorer = scorer
        self._id_TNC = id_TNC

    def extend(self, frame: int, state_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        id_N1C = self._id_TNC[frame, : state_NB.shape[0], None]
        shape = (*state_NB.shape, id_N1C.shape[-1])
        return self._scorer.look_up(state_NB[..., None].expand(shape), id_N1C.expand(shape))

    def settle(self, state_NB: torch.Tensor) -> torch.Tensor:
        """A text may go on, so its end is not scored."""
        return torch.zeros_like(state_NB, dtype=torch.float64)
