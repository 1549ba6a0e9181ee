"""The kinds of streams that are decoded together: one search, and its rows, for each.

A kind's decoder is made when a stream first asks for it, so that a server whose streams all take
the defaults has one, and pays for one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from oasr_backend.decoders.arrays import BoolArray, IntArray, doubled, more_rows
from oasr_backend.decoders.base import ChunkRows, Finish, Search, SearchKind, SearchSettings
from oasr_backend.decoders.bias.base import PrefixScorer
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.decoders.bias.ngram import NgramScorer
from oasr_backend.decoders.bias.spelling import HotwordSpelling
from oasr_backend.errors import ConfigError, StreamStateError, UnknownStreamError
from oasr_backend.options import StreamOptions

#: The kind of a slot without a stream.
_CLOSED = -1


class DecoderKind(NamedTuple):
    """What streams must have in common to be decoded together."""

    search: str
    beam_size: int
    has_hotwords: bool = False
    has_lm: bool = False

    @classmethod
    def of(cls, options: StreamOptions, search: SearchKind) -> DecoderKind:
        beam_size = search.kept(options.beam_size)
        return cls(search.name, beam_size, bool(options.phrases), options.use_lm)


@dataclass(frozen=True)
class KindParts:
    """What the searches of all kinds are made of."""

    searches: Mapping[str, SearchKind]
    settings: SearchSettings
    spelling: HotwordSpelling
    language_model: NgramScorer | None


class KindDecoder:
    """What decodes the streams of one kind. A row is a slot; rows come into use one by one.

    A row is put back to the start when its stream closes, so that it holds no more of the stream.
    """

    def __init__(self, kind: DecoderKind, parts: KindParts) -> None:
        self.kind = kind
        self.head = parts.searches[kind.search].head
        self.hotwords: HotwordScorer | None = None
        scorers: list[PrefixScorer] = []
        if kind.has_hotwords:
            self.hotwords = parts.spelling.scorer(parts.settings.device)
            scorers.append(self.hotwords)
        if kind.has_lm and parts.language_model is not None:
            scorers.append(parts.language_model)
        settings = replace(parts.settings, beam_size=kind.beam_size, scorers=tuple(scorers))
        self.search: Search = parts.searches[kind.search].make(settings)
        if self.search is None:
            raise ConfigError(
                f"the search {kind.search!r} is made as None; have its make return the search"
            )
        self._spelling = parts.spelling
        # False: at the start of a stream, so that the next one needs nothing done.
        self._is_used_S: BoolArray = np.zeros(0, dtype=np.bool_)

    def open(self, slot: int, options: StreamOptions) -> None:
        self._cover(slot)
        self._reset(slot)
        if self.hotwords is not None:
            graph = self._spelling.graph(options)
            self.hotwords.assign([slot], self._spelling.key(options), graph)

    def close(self, slot: int) -> None:
        if self.hotwords is not None:
            self.hotwords.release([slot])
        self._reset(slot)

    def begin(self, frames_NTX: Tensor, chunk: ChunkRows) -> Finish:
        self._is_used_S[chunk.rows] = True
        finish_search = self.search.begin(frames_NTX, chunk)

        def finish() -> None:
            # A stream may have been closed since: its row is written to anyway.
            self._is_used_S[chunk.rows] = True
            finish_search()

        return finish

    def check_integrity(self, slots: IntArray) -> None:
        """`slots` are all that are open and of this kind."""
        if self.hotwords is not None:
            assert self.hotwords.rows == set(slots.tolist()), "phrases of a stream that is gone"
            self.hotwords.check_integrity()
        assert slots.max(initial=-1) < len(self._is_used_S), "a stream has no row"

    def _cover(self, slot: int) -> None:
        if slot >= len(self._is_used_S):
            num_rows = doubled(len(self._is_used_S), row=slot)
            self.search.grow(num_rows)
            # What a search puts into new rows is its own affair.
            self._is_used_S = more_rows(self._is_used_S, num_rows, fill=True)

    def _reset(self, slot: int) -> None:
        if self._is_used_S[slot]:
            self.search.reset_rows([slot])
            self._is_used_S[slot] = False


class KindDecoders:
    """Which decoder has which slot; a slot is its stream's row there."""

    def __init__(self, parts: KindParts) -> None:
        self._parts = parts
        self._number_of: dict[DecoderKind, int] = {}
        self._decoders: dict[int, KindDecoder] = {}
        self._next_number = 0
        self._number_S: IntArray = np.zeros(0, dtype=np.int64)

    @property
    def num_streams(self) -> int:
        return int(np.count_nonzero(self._number_S != _CLOSED))

    @property
    def kinds(self) -> list[DecoderKind]:
        return list(self._number_of)

    def drop_idle(self) -> None:
        """Forgets the kinds that no open stream uses; the next stream of one makes it anew."""
        used = set(np.unique(self._number_S).tolist())
        self._number_of = {kind: n for kind, n in self._number_of.items() if n in used}
        self._decoders = {n: self._decoders[n] for n in self._number_of.values()}

    def open(self, slot: int, options: StreamOptions) -> None:
        """Raises StreamStateError for an open slot; nothing has changed then."""
        if slot >= len(self._number_S):
            num_slots = doubled(len(self._number_S), row=slot)
            self._number_S = more_rows(self._number_S, num_slots, fill=_CLOSED)
        if self._number_S[slot] != _CLOSED:
            raise StreamStateError(f"slot {slot} is open; close it first")
        number = self._number(DecoderKind.of(options, self._parts.searches[options.decoder]))
        self._decoders[number].open(slot, options)
        self._number_S[slot] = number

    def close(self, slot: int) -> None:
        decoder = self.one(slot)
        self._number_S[slot] = _CLOSED
        decoder.close(slot)

    def one(self, slot: int) -> KindDecoder:
        """Raises UnknownStreamError for a slot that is not open."""
        number = int(self._number_S[slot]) if 0 <= slot < len(self._number_S) else _CLOSED
        if number == _CLOSED:
            raise _unknown(slot)
        return self._decoders[number]

    def searches(self, slots: Sequence[int]) -> list[Search]:
        """That of each of these streams. Raises UnknownStreamError for a closed slot."""
        numbers = self._number_S[slots].tolist()
        try:
            return [self._decoders[number].search for number in numbers]
        except KeyError:
            raise _unknown(slots[numbers.index(_CLOSED)]) from None

    def by_kind(self, slots_B: IntArray) -> Iterator[tuple[KindDecoder, IntArray | None]]:
        """The decoders of these streams, each with its rows among them; None: all of them.

        Raises UnknownStreamError for a closed slot.
        """
        number_B = self._number_S[slots_B]
        numbers = np.unique(number_B).tolist()
        if _CLOSED in numbers:
            raise _unknown(int(slots_B[number_B == _CLOSED][0]))
        for number in numbers:
            rows = None if len(numbers) == 1 else np.flatnonzero(number_B == number)
            yield self._decoders[number], rows

    def check_integrity(self, open_slots: Collection[int]) -> None:
        """Exactly these slots have a decoder, and every decoder agrees with itself."""
        found = np.flatnonzero(self._number_S != _CLOSED).tolist()
        assert set(found) == set(open_slots), "a decoder keeps a stream that is gone, or lacks one"
        assert sorted(self._number_of.values()) == sorted(self._decoders), "a kind has no decoder"
        for number, decoder in self._decoders.items():
            decoder.check_integrity(np.flatnonzero(self._number_S == number))

    def _number(self, kind: DecoderKind) -> int:
        if kind not in self._number_of:
            self._decoders[self._next_number] = KindDecoder(kind, self._parts)
            self._number_of[kind] = self._next_number
            self._next_number += 1
        return self._number_of[kind]


def _unknown(slot: int) -> UnknownStreamError:
    return UnknownStreamError(f"slot {slot} has no decoder; open() comes first")
