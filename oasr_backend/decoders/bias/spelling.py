"""Hotwords as the model spells them."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from oasr_backend.decoders.bias.context_graph import ContextGraph
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.errors import InvalidRequestError
from oasr_backend.options import StreamOptions
from oasr_backend.text.tokenizer import Tokenizer


class HotwordSpelling:
    """Phrases in the model's units. Keeps the last graph: streams often bring equal phrases."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's; units that it has beyond the tokenizer's start nothing."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._last: tuple[Hashable, ContextGraph] | None = None

    def scorer(self, device: torch.device) -> HotwordScorer:
        tokenizer = self._tokenizer
        starts = [tokenizer.starts_word(unit) for unit in range(tokenizer.vocab_size)]
        starts += [False] * (self._vocab_size - len(starts))
        return HotwordScorer(starts, device)

    @staticmethod
    def key(options: StreamOptions) -> Hashable:
        """Equal where the graphs are."""
        return (options.phrases, options.hotword_boost)

    def graph(self, options: StreamOptions) -> ContextGraph:
        """Raises InvalidRequestError naming a phrase that the units cannot spell."""
        key = self.key(options)
        if self._last is None or self._last[0] != key:
            phrases = [self._units(phrase) for phrase in options.phrases]
            graph = ContextGraph.build(phrases, options.hotword_boost, vocab_size=self._vocab_size)
            self._last = (key, graph)
        return self._last[1]

    def _units(self, phrase: str) -> list[int]:
        units = self._tokenizer.encode(phrase)
        if not units:
            raise InvalidRequestError(
                f"hotwords: the model's units cannot spell {phrase!r}; leave it out or write it "
                "as it is spoken"
            )
        return units
