"""The last word on the hypotheses of a stream that has ended: who has it, and what it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from oasr_backend.decoders.arrays import IntArray
from oasr_backend.decoders.bias.ngram import NgramScorer
from oasr_backend.decoders.rank import Rank, by_score
from oasr_backend.decoders.second_pass.base import Rescoring, SecondPass
from oasr_backend.options import StreamOptions
from oasr_backend.types import Hypothesis

#: All hypotheses of a slot's beam, best first.
Beam = Callable[[int], list[Hypothesis]]


class Weighing:
    """What a second pass still has to do for streams that have ended: `weigh`, then `settle`.

    `settle` must follow, whatever happens in between: until then the streams' frames are in use.
    """

    def __init__(self, order: FinalOrder, slots: Sequence[int], rescoring: Rescoring) -> None:
        self.slots = slots
        self._order = order
        self._rescoring = rescoring

    def weigh(self) -> None:
        """Runs on the device. Raises nothing, and neither reads nor writes any stream's state.

        So streams may be opened, fed and closed at the same time, these among them.
        """
        self._rescoring.weigh()

    def settle(self) -> None:
        """Stores the outcome for those of the streams that are still open."""
        self._order.settle(self, self._rescoring.settle())


class FinalOrder:
    """The n-gram model weighs where texts end, then the second pass weighs them whole.

    Each does so for the streams that asked for it. Nothing is held or done for the others.
    """

    def __init__(self, second_pass: SecondPass, language_model: NgramScorer | None = None) -> None:
        self._second_pass = second_pass
        self._language_model = language_model
        self._with_lm: dict[int, Rank] = {}
        self._weighed: dict[int, Weighing] = {}
        self._found: dict[int, list[Hypothesis]] = {}
        self._rescored: set[int] = set()

    def open(self, slot: int, options: StreamOptions, rank: Rank = by_score) -> None:
        """`rank` is that of the stream's search."""
        if options.use_lm:
            self._with_lm[slot] = rank
        if options.rescoring:
            self._second_pass.open(slot)

    def close(self, slot: int) -> None:
        """Harmless for a stream that was not opened."""
        self._second_pass.close(slot)
        self._with_lm.pop(slot, None)
        self._weighed.pop(slot, None)
        self._found.pop(slot, None)
        self._rescored.discard(slot)

    @property
    def is_awaited(self) -> bool:
        """Whether `end` has anything to say on any stream."""
        return bool(self._with_lm) or self._second_pass.num_kept > 0

    def keep(self, slots_B: IntArray, num_frames_B: IntArray, encoded_BTD: Tensor) -> None:
        """Keeps a step's encoder frames for the streams that will be rescored, if there are any."""
        self._second_pass.keep(slots_B, num_frames_B, encoded_BTD)

    def end(self, slots: Sequence[int], beam: Beam) -> Weighing | None:
        """Streams that have ended, each once: more calls change nothing.

        The ends of texts count at once. None where the second pass has nothing to weigh.
        """
        self._end_texts([slot for slot in slots if slot in self._with_lm], beam)
        asking = [slot for slot in slots if slot in self._second_pass]
        nbests = {slot: self._found[slot] if slot in self._found else beam(slot) for slot in asking}
        rescoring = self._second_pass.take(nbests) if nbests else None
        if rescoring is None:
            return None
        weighing = Weighing(self, asking, rescoring)
        self._weighed.update(dict.fromkeys(asking, weighing))
        return weighing

    def settle(self, weighing: Weighing, found: dict[int, list[Hypothesis]]) -> None:
        """A slot that was closed since counts no more, even if another stream has it now."""
        for slot in weighing.slots:
            if self._weighed.get(slot) is not weighing:
                continue
            del self._weighed[slot]
            if slot in found:
                self._found[slot] = found[slot]
                self._rescored.add(slot)

    def get(self, slot: int) -> list[Hypothesis] | None:
        """The hypotheses by their last scores, best first; None where the beam's order stands."""
        return self._found.get(slot)

    def best(self, slots: Sequence[int]) -> list[tuple[int, Hypothesis]]:
        """Which of the streams have a last order, as positions, with their best hypothesis."""
        if not self._found:
            return []
        return [(row, self._found[one][0]) for row, one in enumerate(slots) if one in self._found]

    def is_rescored(self, slot: int) -> bool:
        """Whether the second pass had the last word."""
        return slot in self._rescored

    def check_integrity(self, open_slots: Collection[int]) -> None:
        """`open_slots` are those of all open streams."""
        self._second_pass.check_integrity(frozenset(open_slots))
        held = self._found.keys() | self._with_lm.keys() | self._weighed.keys()
        assert held <= set(open_slots), "hypotheses of a stream that is gone"
        assert self._rescored <= self._found.keys(), "a rescored stream without hypotheses"

    def _end_texts(self, slots: Sequence[int], beam: Beam) -> None:
        if self._language_model is not None and slots:
            ranks = [self._with_lm[slot] for slot in slots]
            ended = self._language_model.ended([beam(slot) for slot in slots], ranks)
            self._found.update(zip(slots, ended, strict=True))
            for slot in slots:
                self._with_lm.pop(slot, None)
