"""The second pass of the streams that ask for it: their frames, and the order of their hypotheses.

A hypothesis scores what the attention decoder gives to it, plus `ctc_weight` times its score in the
beam (Zhang et al., "Unified Streaming and Non-streaming Two-pass End-to-end Model", 2020).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from oasr_backend.decoders.second_pass.base import FloatArray, HypothesisScorer
from oasr_backend.decoders.second_pass.encoded_frames import EncodedFrames
from oasr_backend.types import Hypothesis, StreamId

logger = logging.getLogger(__name__)

NBests = Mapping[StreamId, Sequence[Hypothesis]]
#: Tokens of all hypotheses, or frames, padding counted, that one pass takes: its memory's bound.
_MOST_ROWS = 1 << 14


class Rescorer:
    """Nothing is done, and nothing held, for streams that were not opened here."""

    def __init__(
        self, decoder: HypothesisScorer, frames: EncodedFrames, *, ctc_weight: float
    ) -> None:
        """`decoder` is prepared for the device of `frames`."""
        self.frames = frames
        self._decoder = decoder
        self._ctc_weight = ctc_weight

    def open(self, stream_id: StreamId) -> None:
        self.frames.open(stream_id)

    def close(self, stream_id: StreamId) -> None:
        """Harmless for a stream that was not opened."""
        self.frames.close(stream_id)

    def keep(
        self, stream_ids: Sequence[StreamId], num_frames: Sequence[int], encoded_BTD: Tensor
    ) -> None:
        """One step: row i of the (B, T, D) frames belongs to stream i."""
        if not self.frames:
            return
        try:
            self.frames.append(stream_ids, num_frames, encoded_BTD)
        except torch.OutOfMemoryError as error:
            logger.warning("event=rescoring_given_up: no room for encoder frames", exc_info=error)
            for stream_id in stream_ids:
                self.frames.close(stream_id)

    def rescore(
        self,
        nbests: NBests,
        *,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[StreamId, list[Hypothesis]]:
        """The hypotheses of each stream by their new scores, best first; equals keep their order.

        A stream is missing that was too long, has no frame, or met a fault, which is logged.
        Gives the streams' frames back. The decoder runs within `meanwhile`.
        """
        able = [one for one in nbests if one in self.frames and self.frames.num_frames(one)]
        found: dict[StreamId, list[Hypothesis]] = {}
        for stream_ids in self._passes(able, nbests):
            try:
                found.update(self._pass([(one, nbests[one]) for one in stream_ids], meanwhile))
            except Exception as error:
                # The texts of the first pass are on the host: whatever fails here costs no stream.
                logger.error("event=rescoring_failed streams=%d", len(stream_ids), exc_info=error)
        for stream_id in nbests:
            self.frames.close(stream_id)
        return found

    def _pass(
        self,
        nbests: Sequence[tuple[StreamId, Sequence[Hypothesis]]],
        meanwhile: Callable[[], AbstractContextManager[None]],
    ) -> dict[StreamId, list[Hypothesis]]:
        memory = self.frames.gather([stream_id for stream_id, _ in nbests])
        with meanwhile(), torch.inference_mode():
            tokens = [[hypothesis.tokens for hypothesis in nbest] for _, nbest in nbests]
            scores: list[FloatArray] = self._decoder(tokens, memory)
        found: dict[StreamId, list[Hypothesis]] = {}
        for (stream_id, nbest), scores_N in zip(nbests, scores, strict=True):
            if np.isfinite(scores_N).all():
                found[stream_id] = self._ranked(nbest, scores_N)
            else:
                logger.error("event=rescoring_failed stream=%r: scores not finite", stream_id)
        return found

    def _passes(self, stream_ids: Sequence[StreamId], nbests: NBests) -> Iterator[list[StreamId]]:
        """Streams of like length share a pass, as many as fit, but always one."""
        sizes = {
            one: (
                len(nbests[one]),
                1 + max(len(hypothesis.tokens) for hypothesis in nbests[one]),
                self.frames.num_frames(one),
            )
            for one in stream_ids
        }
        batch: list[StreamId] = []
        widest = (0, 0, 0)
        for stream_id in sorted(stream_ids, key=lambda one: sizes[one][1:]):
            size = sizes[stream_id]
            hypotheses, tokens, frames = map(max, widest, size)
            if batch and (len(batch) + 1) * max(hypotheses * tokens, frames) > _MOST_ROWS:
                yield batch
                batch, (hypotheses, tokens, frames) = [], size
            batch.append(stream_id)
            widest = (hypotheses, tokens, frames)
        if batch:
            yield batch

    def _ranked(self, nbest: Sequence[Hypothesis], scores_N: FloatArray) -> list[Hypothesis]:
        pairs = zip(nbest, scores_N.tolist(), strict=True)
        scored = [one._replace(score=score + self._ctc_weight * one.score) for one, score in pairs]
        return sorted(scored, key=lambda one: one.score, reverse=True)
