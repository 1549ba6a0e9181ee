"""The kinds of streams that are decoded together: one search, and its rows, for each."""

from __future__ import annotations

from collections.abc import Mapping
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
from oasr_backend.options import StreamOptions


class DecoderKind(NamedTuple):
    """What streams must have in common to be decoded together."""

    search: str
    beam_size: int
    has_hotwords: bool = False
    has_lm: bool = False

    @classmethod
    def of(cls, options: StreamOptions, search: SearchKind) -> DecoderKind:
        beam_size = options.beam_size if "beam_size" in search.honours else 1
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
