"""Phrases to favour as one automaton over token classes (Aho and Corasick, 1975).

A state is the longest beginning of a phrase that the text ends with. While it is being spelt, a
phrase of which d units are there holds d * boost. The next token decides: it makes the phrase
longer, or starts a word, which confirms a complete phrase, or it breaks the phrase off and the
boost goes back. So "ART" gains nothing from "ARTIST". Units that are in no phrase share class 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from oasr_backend.errors import InvalidRequestError

FloatTable = npt.NDArray[np.float64]
Int32Table = npt.NDArray[np.int32]

#: States times classes of one graph; 16 MiB.
MOST_ENTRIES = 1 << 22


@dataclass(frozen=True)
class ContextGraph:
    """State 0 is the start; `next_SK` is the state behind a token of class k in state s."""

    class_V: Int32Table
    next_SK: Int32Table
    # What a prefix holds in each state, and what is its own if a word starts then.
    held_S: FloatTable
    earned_S: FloatTable

    @classmethod
    def build(
        cls, phrases: Iterable[Sequence[int]], boost: float, *, vocab_size: int
    ) -> ContextGraph:
        """`phrases` are token ids. Raises InvalidRequestError when they need too large a table."""
        trie = _Trie.of(phrases)
        units = sorted({unit for children in trie.children for unit in children})
        num_entries = len(trie.children) * (1 + len(units))
        if num_entries > MOST_ENTRIES:
            raise InvalidRequestError(
                f"hotwords need a table of {num_entries} entries, more than {MOST_ENTRIES}; send "
                "fewer phrases"
            )
        class_V = np.zeros(vocab_size, dtype=np.int32)
        class_V[units] = np.arange(1, 1 + len(units))
        return cls(
            class_V=class_V,
            next_SK=trie.table(class_V, num_classes=1 + len(units)),
            held_S=boost * np.array(trie.depths, dtype=np.float64),
            earned_S=boost * np.array(trie.earned(), dtype=np.float64),
        )


@dataclass
class _Trie:
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])
    depths: list[int] = field(default_factory=lambda: [0])
    is_end: list[bool] = field(default_factory=lambda: [False])
    # The state of the longest proper suffix that begins a phrase.
    fallbacks: list[int] = field(default_factory=list)
    # Every state after those of shorter beginnings.
    order: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def of(cls, phrases: Iterable[Sequence[int]]) -> _Trie:
        trie = cls()
        for phrase in phrases:
            trie._add(phrase)
        trie._link()
        return trie

    def _add(self, phrase: Sequence[int]) -> None:
        state = 0
        for unit in phrase:
            if unit not in self.children[state]:
                self.children[state][unit] = len(self.children)
                self.children.append({})
                self.depths.append(self.depths[state] + 1)
                self.is_end.append(False)
            state = self.children[state][unit]
        self.is_end[state] = state > 0

    def _link(self) -> None:
        self.fallbacks = [0] * len(self.children)
        waiting = deque(self.children[0].values())
        while waiting:
            state = waiting.popleft()
            self.order.append(state)
            for unit, child in self.children[state].items():
                self.fallbacks[child] = self._target(self.fallbacks[state], unit)
                waiting.append(child)

    def _target(self, state: int, unit: int) -> int:
        while state and unit not in self.children[state]:
            state = self.fallbacks[state]
        return self.children[state].get(unit, 0)

    def table(self, class_V: Int32Table, *, num_classes: int) -> Int32Table:
        """The state behind each class in each state; class 0 leads to the start."""
        next_SK = np.zeros((len(self.children), num_classes), dtype=np.int32)
        for state in self.order:
            next_SK[state] = next_SK[self.fallbacks[state]]
            for unit, child in self.children[state].items():
                next_SK[state, class_V[unit]] = child
        return next_SK

    def earned(self) -> list[int]:
        """Units of all phrases that end in a state."""
        found = [0] * len(self.children)
        for state in self.order[1:]:
            own = self.depths[state] if self.is_end[state] else 0
            found[state] = own + found[self.fallbacks[state]]
        return found
