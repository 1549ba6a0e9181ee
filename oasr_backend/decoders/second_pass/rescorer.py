"""The second pass of the streams that ask for it: their frames, and the order of their hypotheses.

A hypothesis scores what the attention decoder gives to it, plus `ctc_weight` times its score in the
beam (Zhang et al., "Unified Streaming and Non-streaming Two-pass End-to-end Model", 2020).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oasr_backend.decoders.arrays import IntArray
from oasr_backend.decoders.second_pass.base import FloatArray, HypothesisScorer, NBests
from oasr_backend.decoders.second_pass.encoded_frames import EncodedFrames, Taken
from oasr_backend.types import Hypothesis

logger = logging.getLogger(__name__)

#: Tokens of all hypotheses, or frames, padding counted, that one pass takes: its memory's bound.
_MOST_ROWS = 1 << 14


class _Ended(NamedTuple):
    """A stream that has ended: its hypotheses, best first, and what the encoder heard of it."""

    slot: int
    nbest: Sequence[Hypothesis]
    taken: Taken

    @property
    def size(self) -> tuple[int, int, int]:
        """Hypotheses, tokens of the longest one and its end, frames."""
        longest = max(len(hypothesis.tokens) for hypothesis in self.nbest)
        return len(self.nbest), 1 + longest, self.taken.num_frames


class Rescorer:
    """Implements SecondPass. Nothing is done or held for streams that were not opened here."""

    reason = ""

    def __init__(
        self, decoder: HypothesisScorer, frames: EncodedFrames, *, ctc_weight: float
    ) -> None:
        """`decoder` is prepared for the device of `frames`."""
        self.frames = frames
        self._decoder = decoder
        self._ctc_weight = ctc_weight

    @property
    def num_kept(self) -> int:
        return len(self.frames)

    def __contains__(self, slot: object) -> bool:
        return slot in self.frames

    def open(self, slot: int) -> None:
        self.frames.open(slot)

    def close(self, slot: int) -> None:
        self.frames.close(slot)

    def keep(self, slots_B: IntArray, num_frames_B: IntArray, encoded_BTD: Tensor) -> None:
        """A stream whose frames find no room on the device is kept no more."""
        if not len(self.frames):
            return
        try:
            self.frames.append(slots_B, num_frames_B, encoded_BTD)
        except torch.OutOfMemoryError as error:
            logger.warning("event=rescoring_given_up: no room for encoder frames", exc_info=error)
            for slot in slots_B.tolist():
                self.frames.close(slot)

    def take(self, nbests: NBests) -> AttentionRescoring | None:
        """Streams that are not kept are left as they are; those without a frame are let go."""
        kept = [slot for slot in nbests if slot in self.frames]
        heard = [slot for slot in kept if self.frames.num_frames(slot)]
        ended = [_Ended(slot, nbests[slot], self.frames.take(slot)) for slot in heard]
        for slot in kept:
            self.frames.close(slot)
        if not ended:
            return None
        return AttentionRescoring(ended, self.frames, self._decoder, ctc_weight=self._ctc_weight)

    def check_integrity(self, open_slots: frozenset[int]) -> None:
        self.frames.check_integrity(open_slots)


class AttentionRescoring:
    """Implements Rescoring. Streams of like length share a pass of the attention decoder.

    A fault costs the streams of its pass their new order; it is logged.
    """

    def __init__(
        self,
        ended: Sequence[_Ended],
        frames: EncodedFrames,
        decoder: HypothesisScorer,
        *,
        ctc_weight: float,
    ) -> None:
        self._ended = ended
        self._frames = frames
        self._decoder = decoder
        self._ctc_weight = ctc_weight
        self._found: dict[int, list[Hypothesis]] = {}

    def weigh(self) -> None:
        for ended in _passes(self._ended):
            try:
                self._found.update(self._pass(ended))
            except Exception as error:
                # The texts of the first pass are on the host: whatever fails here costs no stream.
                logger.error("event=rescoring_failed streams=%d", len(ended), exc_info=error)

    def settle(self) -> dict[int, list[Hypothesis]]:
        """Equal scores keep their order. A second call finds nothing."""
        self._frames.give_back(one.taken for one in self._ended)
        found, self._ended, self._found = self._found, (), {}
        return found

    def _pass(self, ended: Sequence[_Ended]) -> dict[int, list[Hypothesis]]:
        memory = self._frames.gather([one.taken for one in ended])
        with torch.inference_mode():
            tokens = [[hypothesis.tokens for hypothesis in one.nbest] for one in ended]
            scores: list[FloatArray] = self._decoder(tokens, memory)
        found: dict[int, list[Hypothesis]] = {}
        for one, scores_N in zip(ended, scores, strict=True):
            if np.isfinite(scores_N).all():
                found[one.slot] = self._ranked(one.nbest, scores_N)
            else:
                logger.error("event=rescoring_failed slot=%d: scores not finite", one.slot)
        return found

    def _ranked(self, nbest: Sequence[Hypothesis], scores_N: FloatArray) -> list[Hypothesis]:
        pairs = zip(nbest, scores_N.tolist(), strict=True)
        scored = [one._replace(score=score + self._ctc_weight * one.score) for one, score in pairs]
        return sorted(scored, key=lambda one: one.score, reverse=True)


def _passes(ended: Sequence[_Ended]) -> Iterator[list[_Ended]]:
    """Streams of like length share a pass, as many as fit, but always one."""
    batch: list[_Ended] = []
    widest = (0, 0, 0)
    for one in sorted(ended, key=lambda one: one.size[1:]):
        hypotheses, tokens, frames = map(max, widest, one.size)
        if batch and (len(batch) + 1) * max(hypotheses * tokens, frames) > _MOST_ROWS:
            yield batch
            batch, (hypotheses, tokens, frames) = [], one.size
        batch.append(one)
        widest = (hypotheses, tokens, frames)
    if batch:
        yield batch
