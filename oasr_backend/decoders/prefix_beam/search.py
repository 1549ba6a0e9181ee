"""CTC prefix beam search over many streams at once, in tensor operations per frame.

A prefix keeps two log-probs, of its alignments that end in blank and of those that end in its last
token (Hannun et al., "First-pass large vocabulary continuous speech recognition", 2014). Each frame
extends the beam by the frame's W best tokens only; blank and a repeated last token count only when
they are among them, as in WeNet's search. Beside each sum over alignments runs the best single
alignment within the beam: a token's time is the first frame that this alignment gives it.

Prefixes are told apart by 64-bit hashes: an extension that spells a prefix of the beam is counted
there. Equal totals keep the order (rank of the parent prefix, the prefix itself before its
extensions, rank of the token in its frame).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from oasr_backend.decoders.bias.base import ChunkBias
from oasr_backend.decoders.chunk import ChunkRows, Finish
from oasr_backend.decoders.prefix_beam.frame import (
    LOG_ZERO,
    NO_TOKEN,
    Beams,
    FrameCandidates,
    FrameRecord,
    beam_step,
    dead_slots,
    fresh_beams,
    skip_rows,
)
from oasr_backend.decoders.prefix_beam.rows import BeamRows, longest_first, run_frames
from oasr_backend.decoders.prefix_beam.trace import ChunkTrace, pack_chunk
from oasr_backend.decoders.readback import begin_copy
from oasr_backend.decoders.settings import SearchSettings
from oasr_backend.device import to_device

_TOKEN_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


class ChunkCandidates(NamedTuple):
    """`FrameCandidates` of T frames."""

    id_TNC: torch.Tensor
    hash_TNC: torch.Tensor
    extend_TNC: torch.Tensor
    blank_TN: torch.Tensor
    skip_TN: torch.Tensor | None  # frames whose blank is above the threshold

    def frames(self, dead_31B: torch.Tensor) -> list[FrameCandidates]:
        fields = zip(self.id_TNC, self.hash_TNC, self.extend_TNC, self.blank_TN, strict=True)
        return [
            FrameCandidates(ids, hashes, extend, blank, dead_31B)
            for ids, hashes, extend, blank in fields
        ]

    def take_rows(self, row_N: torch.Tensor) -> ChunkCandidates:
        id_TNC, hash_TNC, extend_TNC, blank_TN, skip_TN = self
        return ChunkCandidates(
            id_TNC.index_select(1, row_N),
            hash_TNC.index_select(1, row_N),
            extend_TNC.index_select(1, row_N),
            blank_TN.index_select(1, row_N),
            None if skip_TN is None else skip_TN.index_select(1, row_N),
        )


def select_candidates(log_probs_NTV: torch.Tensor, settings: SearchSettings) -> ChunkCandidates:
    """One top-k for the whole chunk. Equal log-probs rank as torch.topk ranks them."""
    width = min(settings.token_candidates, log_probs_NTV.shape[2])
    best_NTW, id_NTW = log_probs_NTV.float().topk(width, dim=-1)
    best_TNW = best_NTW.transpose(0, 1).double()
    id_TNW = id_NTW.transpose(0, 1)
    is_blank_TNW = id_TNW == settings.blank_id
    extend_TNW = best_TNW.masked_fill(is_blank_TNW, LOG_ZERO)
    id_TNC = F.pad(id_TNW, (1, 0), value=NO_TOKEN)
    return ChunkCandidates(
        id_TNC=id_TNC,
        hash_TNC=_token_hash(id_TNC),
        extend_TNC=F.pad(extend_TNW, (1, 0), value=LOG_ZERO),
        blank_TN=best_TNW.masked_fill(~is_blank_TNW, LOG_ZERO).amax(-1),
        skip_TN=_frames_to_skip(log_probs_NTV, settings),
    )


def _frames_to_skip(log_probs_NTV: torch.Tensor, settings: SearchSettings) -> torch.Tensor | None:
    if settings.blank_threshold == 1.0:
        return None
    blank_TN = log_probs_NTV[:, :, settings.blank_id].float().transpose(0, 1)
    return blank_TN.exp() > settings.blank_threshold


def _token_hash(id_TNC: torch.Tensor) -> torch.Tensor:
    """Spread token ids over 64 bits; int64 arithmetic wraps."""
    mixed = (id_TNC + 2) * _TOKEN_FACTORS[0]
    mixed = (mixed ^ (mixed >> 29)) * _TOKEN_FACTORS[1]
    return mixed ^ (mixed >> 32)


def _decode(
    beams: Beams,
    candidates: ChunkCandidates,
    active_rows: Sequence[int],
    bias: ChunkBias | None = None,
) -> tuple[Beams, list[FrameRecord]]:
    """All frames of a chunk; frame t moves the first `active_rows[t]` rows (never increasing)."""
    columns = candidates.id_TNC.shape[2]
    frames = candidates.frames(dead_slots(beams.beam).to(beams.ints_3NB.device))
    looked = bias.look_up(candidates.id_TNC[:, :, None]) if bias else None

    def step(t: int, beams: Beams) -> tuple[Beams, FrameRecord]:
        num_rows, gains = beams.num_rows, None
        if bias and looked:
            gains = bias.extend(looked.frame(t, num_rows), beams.bonus_1NB, beams.state_KNB)
        stepped = beam_step(beams, frames[t].rows(num_rows), gains)
        if candidates.skip_TN is not None:
            stepped = skip_rows(beams, stepped, candidates.skip_TN[t, :num_rows], columns)
        return stepped

    return run_frames(beams, active_rows, step, Beams._make)


def _scores(beams: Beams, bias: ChunkBias | None) -> torch.Tensor:
    """(N, B) scores as if the streams ended here."""
    if bias is None:
        return beams.total_2NB[0]
    return beams.total_2NB[0] + beams.bonus_1NB[0] + bias.settle(beams.state_KNB)


class PrefixBeamSearch(BeamRows[Beams]):
    """Implements Search.

    A token's log-prob is the best one over the frames that the best alignment gives it. The score
    of a hypothesis is the log-prob of its tokens, summed over the alignments that were kept, and
    what the scorers give to it.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings
        self._scorers = settings.scorers
        fresh = fresh_beams(settings.beam_size, [one.initial_state for one in self._scorers])
        placed = (x.to(settings.device) for x in fresh)
        super().__init__(Beams._make, placed, states=2 * settings.beam_size)

    @torch.inference_mode()
    def begin(self, frames_NTX: torch.Tensor, chunk: ChunkRows) -> Finish:
        """Raises StreamStateError for frames on a device of another type than the beams."""
        self._check_device(frames_NTX)
        candidates = select_candidates(self._log_probs(frames_NTX), self._settings)
        order, chunk = longest_first(chunk)
        if not np.array_equal(order, np.arange(frames_NTX.shape[0])):
            candidates = candidates.take_rows(to_device(order, self._device))
        row_N = to_device(chunk.rows, self._device)
        bias = ChunkBias(self._scorers, chunk.rows) if self._scorers else None
        beams, records = _decode(self._take(row_N), candidates, chunk.active_rows(), bias)
        self._put(row_N, beams)
        packed = pack_chunk(
            records,
            beams,
            _scores(beams, bias),
            id_TNC=candidates.id_TNC,
            extend_TNC=candidates.extend_TNC,
        )
        shape_TNB = (len(records), len(order), beams.beam)
        found = begin_copy(packed)

        def take_in() -> None:
            trace = ChunkTrace.from_packed(found(), shape_TNB)
            self._history.extend(trace.ranked() if bias else trace, chunk)

        return take_in

    def _log_probs(self, frames_NTX: torch.Tensor) -> torch.Tensor:
        if self._settings.takes_log_probs:
            return frames_NTX
        return frames_NTX.float().log_softmax(dim=-1)
