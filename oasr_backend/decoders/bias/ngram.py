"""Shallow fusion: an n-gram model over units adds its weighed log-probs to the beam's ranking.

Each prefix carries its history as a state. A unit that the history does not know is looked up
behind shorter and shorter ones, each step at the cost of a backoff weight (Katz, 1987): at most
order - 1 searches in a sorted table, each for all prefixes and candidates at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oasr_backend.decoders.arrays import IntArray
from oasr_backend.decoders.bias.base import Looked
from oasr_backend.decoders.bias.ngram_tables import NgramModel
from oasr_backend.decoders.rank import Rank, by_score
from oasr_backend.types import Hypothesis


class NgramScorer:
    """Implements PrefixScorer. A prefix gains `weight` * ln P(unit | history) + `unit_bonus`."""

    def __init__(
        self, model: NgramModel, *, weight: float, unit_bonus: float, device: torch.device
    ) -> None:
        """The bonus makes up for what every further unit costs, in favour of longer texts."""
        self.initial_state = model.initial_state
        self._order, self._num_words = model.order, model.num_words
        self._weight, self._unit_bonus = weight, unit_bonus
        self._end_word = model.end_word
        self._device = device
        # States are multiplied, so they are wide; what `where` takes from widens by itself.
        self._word_U = torch.from_numpy(model.word_U).to(device, torch.int64)
        self._key_A = torch.from_numpy(model.key_A).to(device)
        self._next_A = torch.from_numpy(model.next_A).to(device)
        self._log_prob_A = torch.from_numpy(model.log_prob_A).to(device)
        self._log_prob_W = torch.from_numpy(model.log_prob_W).to(device)
        self._backoff_S = torch.from_numpy(model.backoff_S).to(device)
        self._shorter_S = torch.from_numpy(model.shorter_S).to(device, torch.int64)

    def for_chunk(self, rows: IntArray) -> _ChunkNgrams:  # noqa: ARG002
        return _ChunkNgrams(self)

    def look_up(
        self, state_NBC: torch.Tensor, id_NBC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gain, next state) of every unit behind every history."""
        log_prob_NBC, next_NBC = self._find(state_NBC, self._word_U[id_NBC])
        return log_prob_NBC * self._weight + self._unit_bonus, next_NBC

    def ended(
        self, nbests: Sequence[Sequence[Hypothesis]], ranks: Sequence[Rank] | None = None
    ) -> list[list[Hypothesis]]:
        """The hypotheses of texts that end here, best first: each gains `weight` * ln P(</s>).

        `ranks` says by what each text's are ordered; all by their scores when None. Without </s> in
        the file they stay as they are. Equals keep their order.
        """
        if self._end_word is None or not nbests:
            return [list(nbest) for nbest in nbests]
        texts = [one.tokens for nbest in nbests for one in nbest]
        gains = iter(self._end_gains(texts, self._end_word))
        scored = [
            [one._replace(score=one.score + next(gains)) for one in nbest] for nbest in nbests
        ]
        ranks = [by_score] * len(scored) if ranks is None else ranks
        return [
            sorted(nbest, key=rank, reverse=True) for nbest, rank in zip(scored, ranks, strict=True)
        ]

    def _end_gains(self, texts: Sequence[Sequence[int]], end_word: int) -> list[float]:
        state_N11 = self._states(texts)
        log_prob_N11, _ = self._find(state_N11, torch.full_like(state_N11, end_word))
        gains: list[float] = (log_prob_N11.flatten() * self._weight).tolist()
        return gains

    def _states(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """(N, 1, 1) histories of whole texts. No state reaches back further than their ends."""
        reach = self._order - 1
        state_N11 = torch.tensor([
            0 if len(text) >= reach else self.initial_state for text in texts
        ], device=self._device)[:, None, None]  # fmt: skip
        for back in range(reach, 0, -1):
            unit_N11 = torch.tensor([
                text[-back] if len(text) >= back else -1 for text in texts
            ], device=self._device)[:, None, None]  # fmt: skip
            _, next_N11 = self.look_up(state_N11, unit_N11.clamp(min=0))
            state_N11 = torch.where(unit_N11 >= 0, next_N11, state_N11)
        return state_N11

    def _find(
        self, state_NBC: torch.Tensor, word_NBC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ln P, next state) of every word behind every history."""
        log_prob_NBC, next_NBC = self._log_prob_W[word_NBC].double(), 1 + word_NBC
        cost_NBC = torch.zeros_like(log_prob_NBC)
        is_open_NBC = torch.ones_like(word_NBC, dtype=torch.bool)
        for _ in range(self._order - 1):
            key_NBC = state_NBC * self._num_words + word_NBC
            place_NBC = torch.searchsorted(self._key_A, key_NBC).clamp(max=len(self._key_A) - 1)
            is_here_NBC = is_open_NBC & (state_NBC > 0) & (self._key_A[place_NBC] == key_NBC)
            log_prob_NBC = torch.where(is_here_NBC, self._log_prob_A[place_NBC], log_prob_NBC)
            next_NBC = torch.where(is_here_NBC, self._next_A[place_NBC], next_NBC)
            is_open_NBC = is_open_NBC & ~is_here_NBC
            cost_NBC = cost_NBC + self._backoff_S[state_NBC] * is_open_NBC
            state_NBC = self._shorter_S[state_NBC]
        return log_prob_NBC + cost_NBC, next_NBC


class _ChunkNgrams:
    """Implements ChunkScorer."""

    def __init__(self, scorer: NgramScorer) -> None:
        self._scorer = scorer

    def look_up(self, id_XNAC: torch.Tensor) -> Looked:
        # Where there is no unit, any valid one will do.
        return (id_XNAC.clamp(min=0),)

    def extend(self, looked: Looked, state_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (id_NAC,) = looked
        shape = (*state_NB.shape, id_NAC.shape[-1])
        return self._scorer.look_up(state_NB[..., None].expand(shape), id_NAC.expand(shape))

    def settle(self, state_NB: torch.Tensor) -> torch.Tensor:
        """A text may go on: its end is scored by `NgramScorer.ended`, when there is one."""
        return torch.zeros_like(state_NB, dtype=torch.float64)
