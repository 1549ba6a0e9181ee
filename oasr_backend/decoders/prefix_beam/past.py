"""The older tokens of one beam: a settled transcript, then blocks that keep their variants apart.

An entry is (token, time, bits of a fp32 log-prob). The log-prob belongs to the token *before* the
entry's token, because only the next token closes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from oasr_backend.decoders.arrays import IntArray

Entries = npt.NDArray[np.int32]  # (3, ..., L)
TOKEN, TIME, PREVIOUS_LOG_PROB = range(3)


def to_log_probs(bits_L: npt.NDArray[np.int32]) -> list[float]:
    log_probs: list[float] = np.ascontiguousarray(bits_L).view(np.float32).tolist()
    return log_probs


@dataclass(frozen=True)
class _Block:
    """A stretch of entries as each state had them when the stretch left the window."""

    variants_3GL: Entries
    variant_S: list[int]
    origin_S: list[int]  # the state, as of the block before, that each state grew out of


@dataclass
class Past:
    """`tokens`, `times` and `log_probs` are shared by all hypotheses and never change again."""

    tokens: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)
    _next_look: int = 1

    def settle(self, entries_3L: Entries) -> None:
        """Append entries that all live states share. The last one only closes the one before."""
        self.tokens.extend(entries_3L[TOKEN, :-1].tolist())
        self.times.extend(entries_3L[TIME, :-1].tolist())
        self.log_probs.extend(to_log_probs(entries_3L[PREVIOUS_LOG_PROB, 1:]))

    def push(self, entries_3SL: Entries, origin_S: IntArray) -> None:
        """Append a block: the entries of S states, and which state each was at the last push."""
        numbers: dict[bytes, int] = {}
        first: list[int] = []
        variants = []
        for state in range(len(origin_S)):
            number = numbers.setdefault(entries_3SL[:, state].tobytes(), len(first))
            variants.append(number)
            if number == len(first):
                first.append(state)
        self.blocks.append(_Block(entries_3SL[:, first], variants, origin_S.tolist()))

    def entries(self, state: int) -> list[Entries]:
        """The blocks' entries of one state (its number at the last push), oldest first."""
        found = []
        for block in reversed(self.blocks):
            found.append(block.variants_3GL[:, block.variant_S[state]])
            state = block.origin_S[state]
        return found[::-1]

    def settle_blocks(self, states: IntArray, next_3S: Entries) -> None:
        """Settle the oldest blocks in which `states` (numbers at the last push) agree.

        `next_3S` is each state's entry after the newest block. A look costs time per block, so the
        next one waits until there are a quarter more.
        """
        if len(self.blocks) < self._next_look:
            return
        shared = self._shared_blocks(states)
        if len(shared) == len(self.blocks) and (next_3S == next_3S[:, :1]).all():
            shared.append(next_3S[:, :1])
        for entries_3L, next_3L in pairwise(shared):
            self.settle(np.concatenate((entries_3L, next_3L[:, :1]), axis=1))
        del self.blocks[: max(0, len(shared) - 1)]
        self._next_look = len(self.blocks) * 5 // 4 + 1

    def _shared_blocks(self, states: IntArray) -> list[Entries]:
        variants: list[set[int]] = []
        reached = set(states.tolist())
        for block in reversed(self.blocks):
            variants.append({block.variant_S[state] for state in reached})
            reached = {block.origin_S[state] for state in reached}
        shared = []
        for block, variant in zip(self.blocks, reversed(variants), strict=True):
            if len(variant) > 1:
                break
            shared.append(block.variants_3GL[:, variant.pop()])
        return shared
