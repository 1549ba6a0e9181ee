"""Every stream's decoder, whatever its options ask for: one batched decode per kind and step.

A kind is a search with its beam size and scorers. Streams are named by slot, and a slot is a
stream's row in its search.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import Tensor

from oasr_backend.decoders.arrays import IntArray, doubled, more_rows
from oasr_backend.decoders.base import ChunkRows, Finish, SearchKind, SearchSettings, Tail
from oasr_backend.decoders.bias.ngram import NgramScorer
from oasr_backend.decoders.bias.spelling import HotwordSpelling
from oasr_backend.decoders.chunk import nothing_to_finish
from oasr_backend.decoders.kinds import DecoderKind, KindDecoder, KindDecoders, KindParts
from oasr_backend.decoders.option_check import OptionCheck
from oasr_backend.decoders.second_pass.base import SecondPass
from oasr_backend.decoders.second_pass.final_order import FinalOrder, Weighing
from oasr_backend.device import to_device
from oasr_backend.options import StreamOptions
from oasr_backend.text.tokenizer import Tokenizer
from oasr_backend.types import Hypothesis


class DecoderGroup:
    """The decoders of all streams of an engine. Not thread-safe."""

    def __init__(
        self,
        searches: Mapping[str, SearchKind],
        settings: SearchSettings,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        second_pass: SecondPass,
        language_model: NgramScorer | None = None,
    ) -> None:
        """`searches` are the checkpoint's, the default first; streams choose their beam size."""
        spelling = HotwordSpelling(tokenizer, vocab_size)
        self.searches = searches
        self._kinds = KindDecoders(KindParts(searches, settings, spelling, language_model))
        self._options = OptionCheck(
            searches,
            spelling,
            has_lm=language_model is not None,
            no_rescoring=second_pass.reason,
        )
        # Frames that each slot's stream has heard.
        self._start_S: IntArray = np.zeros(0, dtype=np.int64)
        self._final_order = FinalOrder(second_pass, language_model)

    @property
    def num_streams(self) -> int:
        return self._kinds.num_streams

    @property
    def kinds(self) -> list[DecoderKind]:
        """Those that any stream has asked for, as far as they are kept."""
        return self._kinds.kinds

    def drop_idle_kinds(self) -> None:
        """Forgets the kinds that no open stream uses; the next stream of one makes it anew."""
        self._kinds.drop_idle()

    def resolve(self, options: StreamOptions) -> StreamOptions:
        """With the name of the search that the stream gets, where it names none."""
        return self._options.resolve(options)

    def check(self, options: StreamOptions) -> None:
        """Raises InvalidRequestError for what the search, the model or the server has not."""
        self._options.check(options)

    def open(self, slot: int, options: StreamOptions) -> None:
        """Raises StreamStateError for an open slot, InvalidRequestError as `check` does."""
        options = self.resolve(options)
        self.check(options)
        self._kinds.open(slot, options)
        self._final_order.open(slot, options, self.searches[options.decoder].rank)
        if slot >= len(self._start_S):
            self._start_S = more_rows(self._start_S, doubled(len(self._start_S), row=slot))
        self._start_S[slot] = 0

    def close(self, slot: int) -> None:
        """Raises UnknownStreamError for a slot that is not open."""
        self._final_order.close(slot)
        self._kinds.close(slot)

    def begin(
        self,
        slots_B: IntArray,
        num_frames_B: IntArray,
        output_heads: Mapping[str, Tensor],
        encoded_BTD: Tensor,
    ) -> Finish:
        """One step: row i of each head's (B, T, ...) output belongs to slot i; slots are distinct.

        The output has been read, as the device sees it, when this returns; hypotheses grow with
        the returned call.
        """
        # Copies: the caller may fill its arrays for the next step before this one is finished.
        chunk = ChunkRows(slots_B.copy(), num_frames_B.copy(), self._start_S[slots_B])
        begun = [
            _begin(decoder, output_heads[decoder.head], chunk, rows)
            for decoder, rows in self._kinds.by_kind(slots_B)
        ]
        self._start_S[slots_B] += num_frames_B
        self._final_order.keep(slots_B, num_frames_B, encoded_BTD)
        if len(begun) == 1:
            return begun[0]

        def finish() -> None:
            for finish_kind in begun:
                finish_kind()

        return finish

    @property
    def weighs_ends(self) -> bool:
        """Whether `end` may change the order of any stream's hypotheses."""
        return self._final_order.is_awaited

    def end(self, slots: Sequence[int]) -> Weighing | None:
        """Streams that have ended get the last order of their hypotheses, once.

        `best`, `tails` and `nbest` follow it from then on: at once as far as the ends of texts go,
        and from `Weighing.settle` on, which the caller must call, where one is returned.
        """
        return self._final_order.end(slots, self._beam)

    def is_rescored(self, slot: int) -> bool:
        return self._final_order.is_rescored(slot)

    def best(self, slots: Sequence[int], *, skips: Sequence[int] | None = None) -> list[Hypothesis]:
        """Each stream's best hypothesis, without its first `skips` tokens; no device work."""
        skips = [0] * len(slots) if skips is None else skips
        found = [
            search.hypotheses(slot, 1, skip=skip)[0]
            for search, slot, skip in zip(self._kinds.searches(slots), slots, skips, strict=True)
        ]
        for row, best in self._final_order.best(slots):
            found[row] = best.without_first(skips[row])
        return found

    def tails(self, slots: Sequence[int], skips: Sequence[int]) -> list[Tail]:
        """What a transcript needs of each stream whose first `skips` tokens it has already."""
        found = [
            search.tail(slot, skip)
            for search, slot, skip in zip(self._kinds.searches(slots), slots, skips, strict=True)
        ]
        for row, best in self._final_order.best(slots):
            found[row] = Tail(best.tokens[skips[row] :], found[row].num_stable)
        return found

    def nbest(self, slot: int, count: int, *, skip: int = 0) -> list[Hypothesis]:
        """The `count` best hypotheses of one stream, or as many as there are; best first.

        Without their first `skip` tokens, which no later chunk may change.
        """
        final = self._final_order.get(slot)
        if final is not None:
            return [hypothesis.without_first(skip) for hypothesis in final[:count]]
        return self._kinds.one(slot).search.hypotheses(slot, count, skip=skip)

    def num_stable(self, slot: int) -> int:
        """How many first tokens of every hypothesis can no longer change."""
        return self._kinds.one(slot).search.num_stable(slot)

    def check_integrity(self, open_slots: Collection[int]) -> None:
        """Exactly these slots have a decoder, and every decoder agrees with itself."""
        self._kinds.check_integrity(open_slots)
        self._final_order.check_integrity(open_slots)

    def _beam(self, slot: int) -> list[Hypothesis]:
        return self.nbest(slot, self._kinds.one(slot).kind.beam_size)


def _begin(
    decoder: KindDecoder, frames_BTX: Tensor, chunk: ChunkRows, rows: IntArray | None
) -> Finish:
    if rows is not None:
        frames_BTX = frames_BTX.index_select(0, to_device(rows, frames_BTX.device))
        chunk = ChunkRows(chunk.rows[rows], chunk.num_frames[rows], chunk.start_frames[rows])
    longest = int(chunk.num_frames.max(initial=0))
    if not longest:
        return nothing_to_finish
    return decoder.begin(frames_BTX[:, :longest], chunk)
