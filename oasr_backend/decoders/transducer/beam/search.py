"""Modified beam search of a stateless transducer, for many streams at once.

A frame gives a path one unit at most (the restriction of Kang et al., "Fast and Parallel Decoding
for Transducer", 2022): the best `beam_size` of all pairs of a path and a unit go on, blank leaves a
path's tokens as they are, and pairs that spell the same tokens add up. Nothing else is pruned, and
paths go over chunk edges unchanged. Hypotheses are ordered by score per token, with the start
context counted among the tokens.

Of each path only its best units can be among the best pairs, so that no more are looked at; with
scorers, which may turn the order round, `token_candidates` are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oasr_backend.decoders.bias.base import ChunkBias, Gains
from oasr_backend.decoders.chunk import ChunkRows, Finish
from oasr_backend.decoders.prefix_beam.rows import BeamRows, longest_first, run_frames
from oasr_backend.decoders.readback import begin_copy
from oasr_backend.decoders.settings import SearchSettings
from oasr_backend.decoders.transducer.beam.frame import (
    PathBeams,
    PathCandidates,
    PathRecord,
    best_units,
    fresh_paths,
    path_step,
)
from oasr_backend.decoders.transducer.beam.trace import pack_paths, unpack_paths
from oasr_backend.decoders.transducer.network import TransducerNetwork
from oasr_backend.device import to_device


class TransducerBeamSearch(BeamRows[PathBeams]):
    """Implements Search over the projected frames (N, T, J) of the head "joiner".

    The score of a hypothesis is the log-prob of its tokens, summed over the alignments that were
    kept, and what the scorers give to it. A token's time is its frame, in the more likely of two
    alignments that met; its log-prob is that of the frame.
    """

    def __init__(self, network: TransducerNetwork, settings: SearchSettings) -> None:
        self._network = network
        self._scorers = settings.scorers
        self._beam = settings.beam_size
        self._width = self._beam
        if settings.scorers:
            self._width = max(self._beam, settings.token_candidates)
        states = [one.initial_state for one in settings.scorers]
        fresh = fresh_paths(self._beam, network.start_context, states)
        placed = (x.to(settings.device) for x in fresh)
        super().__init__(PathBeams._make, placed, states=self._beam)

    @torch.inference_mode()
    def begin(self, frames_NTX: Tensor, chunk: ChunkRows) -> Finish:
        """Raises StreamStateError for frames on a device of another type than the beams."""
        self._check_device(frames_NTX)
        order, chunk = longest_first(chunk)
        if not np.array_equal(order, np.arange(frames_NTX.shape[0])):
            frames_NTX = frames_NTX.index_select(0, to_device(order, self._device))
        row_N = to_device(chunk.rows, self._device)
        bias = ChunkBias(self._scorers, chunk.rows) if self._scorers else None
        active = chunk.active_rows()
        beams, records = self._decode(self._take(row_N), frames_NTX, active, bias)
        self._put(row_N, beams)
        score_NB = _scores(beams, bias)
        found = begin_copy(pack_paths(records, beams, score_NB, blank_id=self._network.blank_id))
        shape_TNB = (len(records), len(order), self._beam)

        def take_in() -> None:
            start = self._network.context_size
            trace = unpack_paths(found(), shape_TNB, num_start_tokens=start)
            self._history.extend(trace, chunk)

        return take_in

    def _decode(
        self,
        beams: PathBeams,
        frames_NTJ: Tensor,
        active_rows: Sequence[int],
        bias: ChunkBias | None,
    ) -> tuple[PathBeams, list[PathRecord]]:
        blank_id = self._network.blank_id

        def step(t: int, beams: PathBeams) -> tuple[PathBeams, PathRecord]:
            candidates = self._candidates(beams, frames_NTJ[: active_rows[t], t])
            gains = _gains(beams, candidates, bias, blank_id) if bias else None
            return path_step(beams, candidates, blank_id, gains)

        return run_frames(beams, active_rows, step, PathBeams._make)

    def _candidates(self, beams: PathBeams, frame_NJ: Tensor) -> PathCandidates:
        predicted_XJ = self._network.predict(beams.contexts)
        frame_XJ = frame_NJ[:, None].expand(-1, self._beam, -1).flatten(0, 1)
        logits_XV = self._network.logits(frame_XJ, predicted_XJ)
        return best_units(logits_XV, self._beam, min(self._width, logits_XV.shape[-1]))


def _gains(beams: PathBeams, candidates: PathCandidates, bias: ChunkBias, blank_id: int) -> Gains:
    id_NBW = candidates.id_NBW
    looked = bias.look_up(id_NBW.masked_fill(id_NBW == blank_id, -1))
    return bias.extend(looked, beams.bonus_1NB, beams.state_KNB)


def _scores(beams: PathBeams, bias: ChunkBias | None) -> Tensor:
    """(N, B) scores as if the streams ended here."""
    if bias is None:
        return beams.score_1NB[0]
    return beams.score_1NB[0] + beams.bonus_1NB[0] + bias.settle(beams.state_KNB)
