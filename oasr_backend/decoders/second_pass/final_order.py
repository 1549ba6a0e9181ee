"""The last word on the hypotheses of a stream that has ended: who has it, and what it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from oasr_backend.decoders.bias.ngram import NgramScorer
from oasr_backend.decoders.second_pass.base import NoDecoder
from oasr_backend.decoders.second_pass.rescorer import Rescorer
from oasr_backend.options import StreamOptions
from oasr_backend.types import Hypothesis, StreamId

#: All hypotheses of a stream's beam, best first.
Beam = Callable[[StreamId], list[Hypothesis]]


class FinalOrder:
    """The n-gram model weighs where texts end, then the attention decoder weighs them whole.

    Each does so for the streams that asked for it. Nothing is held or done for the others.
    """

    def __init__(
        self, rescorer: Rescorer | NoDecoder, language_model: NgramScorer | None = None
    ) -> None:
        self._rescorer = rescorer if isinstance(rescorer, Rescorer) else None
        self._language_model = language_model
        self._with_lm: set[StreamId] = set()
        self._found: dict[StreamId, list[Hypothesis]] = {}
        self._rescored: set[StreamId] = set()

    def open(self, stream_id: StreamId, options: StreamOptions) -> None:
        if options.use_lm:
            self._with_lm.add(stream_id)
        if options.rescoring and self._rescorer is not None:
            self._rescorer.open(stream_id)

    def close(self, stream_id: StreamId) -> None:
        """Harmless for a stream that was not opened."""
        if self._rescorer is not None:
            self._rescorer.close(stream_id)
        self._with_lm.discard(stream_id)
        self._found.pop(stream_id, None)
        self._rescored.discard(stream_id)

    @property
    def is_awaited(self) -> bool:
        """Whether `decide` has anything to say on any stream."""
        keeps_frames = self._rescorer is not None and len(self._rescorer.frames) > 0
        return keeps_frames or bool(self._with_lm)

    def keep(
        self, stream_ids: Sequence[StreamId], num_frames: Sequence[int], encoded_BTD: Tensor
    ) -> None:
        """Keeps a step's encoder frames for the streams that will be rescored, if there are any."""
        if self._rescorer is not None:
            self._rescorer.keep(stream_ids, num_frames, encoded_BTD)

    def decide(
        self,
        stream_ids: Sequence[StreamId],
        beam: Beam,
        *,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Streams that have ended, each once: more calls change nothing.

        The attention decoder runs within `meanwhile`; a stream that it cannot weigh is as before.
        """
        self._end_texts([one for one in stream_ids if one in self._with_lm], beam)
        if self._rescorer is None:
            return
        asking = [stream_id for stream_id in stream_ids if stream_id in self._rescorer.frames]
        nbests = {one: self._found[one] if one in self._found else beam(one) for one in asking}
        if nbests:
            rescored = self._rescorer.rescore(nbests, meanwhile=meanwhile)
            self._found.update(rescored)
            self._rescored.update(rescored)

    def get(self, stream_id: StreamId) -> list[Hypothesis] | None:
        """The hypotheses by their last scores, best first; None where the beam's order stands."""
        return self._found.get(stream_id)

    def best(self, stream_ids: Sequence[StreamId]) -> list[tuple[int, Hypothesis]]:
        """Which of the streams have a last order, as positions, with their best hypothesis."""
        if not self._found:
            return []
        rows = enumerate(stream_ids)
        return [(row, self._found[one][0]) for row, one in rows if one in self._found]

    def is_rescored(self, stream_id: StreamId) -> bool:
        """Whether the attention decoder had the last word."""
        return stream_id in self._rescored

    def check_integrity(self, stream_ids: Collection[StreamId]) -> None:
        """`stream_ids` are all that are open."""
        if self._rescorer is not None:
            self._rescorer.frames.check_integrity()
        held = self._found.keys() | self._with_lm
        assert held <= set(stream_ids), "hypotheses of a stream that is gone"
        assert self._rescored <= self._found.keys(), "a rescored stream without hypotheses"

    def _end_texts(self, stream_ids: Sequence[StreamId], beam: Beam) -> None:
        if self._language_model is not None and stream_ids:
            ended = self._language_model.ended([beam(stream_id) for stream_id in stream_ids])
            self._found.update(zip(stream_ids, ended, strict=True))
            self._with_lm.difference_update(stream_ids)
