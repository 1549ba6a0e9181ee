"""N-grams as sorted tables: a history is a state, and what follows it is found by its key.

State 0 is the empty history, state 1 + w that of word w alone, and the longer ones come in the
order of their keys, the shorter first. So all keys together are sorted, and entry a of them leads
to state 1 + W + a, except where the n-gram is too long to be a history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oasr_backend.decoders.arrays import IntArray

FloatTable = npt.NDArray[np.float32]
StateTable = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

#: For units that the file leaves out where it has no <unk> either: ln P.
_FLOOR = -10.0 * math.log(10)


@dataclass(frozen=True)
class NgramModel:
    """W words are the U units, the text's two bounds, and what stands for unknown units.

    `key_A` is sorted and holds state * W + word of every n-gram longer than one word. Logarithms
    are natural, in float32: files carry no more digits.
    """

    order: int
    num_words: int
    initial_state: int
    # None where the file says nothing of the end of a text.
    end_word: int | None
    word_U: StateTable  # <unk> for the units that the file leaves out
    key_A: IntArray
    log_prob_A: FloatTable
    next_A: StateTable
    log_prob_W: FloatTable
    backoff_S: FloatTable
    shorter_S: StateTable  # the history without its oldest words, as far as needed to be a state


@dataclass(frozen=True)
class Section:
    """The A n-grams of one order N, as the file has them; `line_A` is where. Natural logarithms."""

    word_AN: StateTable
    log_prob_A: FloatTable
    backoff_A: FloatTable
    line_A: npt.NDArray[np.uint32]


class NgramError(Exception):
    """An n-gram that does not fit the others; the message goes on after its name."""

    def __init__(self, what: str, section: Section, entry: int) -> None:
        super().__init__(what)
        self.words: list[int] = section.word_AN[entry].tolist()
        self.line = int(section.line_A[entry])


def build_tables(
    sections: Sequence[Section], *, num_units: int, begin: int, end: int, unknown: int
) -> NgramModel:
    """`sections[n]` holds the n-grams of n + 1 words; `begin`, `end`, `unknown` are words.

    Raises NgramError for one that is there twice, or without its beginning or its last word alone.
    """
    sections = [section for section in sections if len(section.line_A)]
    order = max(section.word_AN.shape[1] for section in sections)
    tables = _Tables(num_words=num_units + 3, order=order)
    tables.add_words(sections[0])
    for section in sections[1:]:
        tables.add(section)
    unit_U = np.arange(num_units, dtype=np.int32)
    stands_in = tables.has_word_W[unknown] & ~tables.has_word_W[:num_units]
    return NgramModel(
        order=order,
        num_words=tables.num_words,
        initial_state=1 + begin,
        end_word=end if tables.has_word_W[end] else None,
        word_U=np.where(stands_in, unknown, unit_U).astype(np.int32),
        key_A=tables.key_A,
        log_prob_A=tables.log_prob_A,
        next_A=tables.next_A,
        log_prob_W=tables.log_prob_W,
        backoff_S=tables.backoff_S,
        shorter_S=tables.shorter_S,
    )


class _Tables:
    """`NgramModel`'s, as they grow by one order after the other."""

    def __init__(self, *, num_words: int, order: int) -> None:
        self.num_words = num_words
        self._order = order
        self.has_word_W: Flags = np.zeros(num_words, dtype=np.bool_)
        self.log_prob_W: FloatTable = np.full(num_words, _FLOOR, dtype=np.float32)
        self.backoff_S: FloatTable = np.zeros(1 + num_words, dtype=np.float32)
        self.shorter_S: StateTable = np.zeros(1 + num_words, dtype=np.int32)
        self.key_A: IntArray = np.zeros(0, dtype=np.int64)
        self.log_prob_A: FloatTable = np.zeros(0, dtype=np.float32)
        self.next_A: StateTable = np.zeros(0, dtype=np.int32)

    def add_words(self, section: Section) -> None:
        word_A = section.word_AN[:, 0]
        order_A = np.argsort(word_A, kind="stable")
        _refuse_twins(word_A[order_A], order_A, section)
        self.has_word_W[word_A] = True
        self.log_prob_W[word_A] = section.log_prob_A
        self.backoff_S[1 + word_A] = section.backoff_A

    def add(self, section: Section) -> None:
        """The n-grams of the next order."""
        last_A = section.word_AN[:, -1]
        parent_A = self._beginnings(section)
        _refuse_where(~self.has_word_W[last_A], "has a last unit that is no 1-gram", section)
        key_A = parent_A * self.num_words + last_A
        order_A = np.argsort(key_A, kind="stable")
        _refuse_twins(key_A[order_A], order_A, section)
        shorter_A = self._longest(self.shorter_S[parent_A[order_A]], last_A[order_A])
        next_A = shorter_A
        if section.word_AN.shape[1] < self._order:
            first_state = len(self.backoff_S)
            next_A = np.arange(first_state, first_state + len(key_A), dtype=np.int32)
            self.backoff_S = np.concatenate((self.backoff_S, section.backoff_A[order_A]))
            self.shorter_S = np.concatenate((self.shorter_S, shorter_A))
        self.key_A = np.concatenate((self.key_A, key_A[order_A]))
        self.log_prob_A = np.concatenate((self.log_prob_A, section.log_prob_A[order_A]))
        self.next_A = np.concatenate((self.next_A, next_A))

    def _beginnings(self, section: Section) -> IntArray:
        """The state of all words but the last."""
        word_NA = section.word_AN.T
        state_A: IntArray = 1 + word_NA[0].astype(np.int64)
        is_there_A = self.has_word_W[word_NA[0]]
        for word_A in word_NA[1:-1]:
            state_A, is_here_A = self._find(state_A, word_A)
            is_there_A = is_there_A & is_here_A
        size = len(word_NA) - 1
        _refuse_where(~is_there_A, f"is there without its beginning, a {size}-gram", section)
        return state_A

    def _find(self, state_A: IntArray, word_A: StateTable) -> tuple[IntArray, Flags]:
        """(state behind it or 0, whether it is there) of each word behind each history."""
        if not len(self.key_A):
            return np.zeros_like(state_A), np.zeros(len(state_A), dtype=np.bool_)
        key_A = state_A * self.num_words + word_A
        place_A = np.searchsorted(self.key_A, key_A).clip(max=len(self.key_A) - 1)
        is_here_A: Flags = self.key_A[place_A] == key_A
        next_A: IntArray = np.where(is_here_A, self.next_A[place_A], 0).astype(np.int64)
        return next_A, is_here_A

    def _longest(self, history_A: StateTable, word_A: StateTable) -> StateTable:
        """The longest state that `history_A` without its oldest words, then the word, end with."""
        found_A = 1 + word_A
        open_A = np.flatnonzero(history_A)
        state_A = history_A[open_A].astype(np.int64)
        while len(open_A):
            next_A, is_here_A = self._find(state_A, word_A[open_A])
            found_A[open_A[is_here_A]] = next_A[is_here_A]
            state_A = np.where(is_here_A, 0, self.shorter_S[state_A])
            open_A, state_A = open_A[state_A > 0], state_A[state_A > 0]
        return found_A


def _refuse_twins(key_A: IntArray | StateTable, order_A: IntArray, section: Section) -> None:
    """`key_A` is sorted; entry a of it is n-gram `order_A[a]`."""
    twin_A = np.zeros(len(key_A), dtype=np.bool_)
    twin_A[order_A[1:]] = key_A[1:] == key_A[:-1]
    _refuse_where(twin_A, "is there twice", section)


def _refuse_where(is_wrong_A: Flags, what: str, section: Section) -> None:
    if is_wrong_A.any():
        raise NgramError(what, section, int(is_wrong_A.argmax()))
