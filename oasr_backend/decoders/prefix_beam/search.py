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
from oasr_backend.decoders.chunk import ChunkRows, Finish, Tail
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
from oasr_backend.decoders.prefix_beam.history import BeamHistory
from oasr_backend.decoders.prefix_beam.trace import ChunkTrace, pack_chunk
from oasr_backend.decoders.readback import begin_copy
from oasr_backend.decoders.settings import SearchSettings
from oasr_backend.errors import StreamStateError
from oasr_backend.types import Hypothesis

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


def run_frames(
    beams: Beams,
    candidates: ChunkCandidates,
    active_rows: Sequence[int],
    bias: ChunkBias | None = None,
) -> tuple[Beams, list[FrameRecord]]:
    """All frames of a chunk; frame t moves the first `active_rows[t]` rows (never increasing)."""
    columns = candidates.id_TNC.shape[2]
    frames = candidates.frames(dead_slots(beams.beam).to(beams.ints_3NB.device))
    finished: list[Beams] = []
    records: list[FrameRecord] = []
    for t, (num_rows, frame) in enumerate(zip(active_rows, frames, strict=True)):
        if num_rows < beams.num_rows:
            finished.append(beams.rows(num_rows, beams.num_rows))
            beams = beams.rows(0, num_rows)
        gains = bias.extend(t, beams.bonus_1NB, beams.state_KNB) if bias else None
        stepped = beam_step(beams, frame.rows(num_rows), gains)
        if candidates.skip_TN is not None:
            stepped = skip_rows(beams, stepped, candidates.skip_TN[t, :num_rows], columns)
        beams, record = stepped
        records.append(record)
    if finished:
        parts = zip(beams, *reversed(finished), strict=True)
        beams = Beams(*(torch.cat(part, dim=1) for part in parts))
    return beams, records


def _scores(beams: Beams, bias: ChunkBias | None) -> torch.Tensor:
    """(N, B) scores as if the streams ended here."""
    if bias is None:
        return beams.total_2NB[0]
    return beams.total_2NB[0] + beams.bonus_1NB[0] + bias.settle(beams.state_KNB)


class PrefixBeamSearch:
    """Implements Search. Scores and hashes stay on the device, tokens and times on the host.

    A token's log-prob is the best one over the frames that the best alignment gives it. The score
    of a hypothesis is the log-prob of its tokens, summed over the alignments that were kept, and
    what the scorers give to it.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings
        self._device = settings.device
        self._scorers = settings.scorers
        fresh = fresh_beams(settings.beam_size, [one.initial_state for one in self._scorers])
        self._fresh = Beams(*(x.to(self._device) for x in fresh))
        self._pool = self._fresh.rows(0, 0)
        self._history = BeamHistory(settings.beam_size)

    @torch.inference_mode()
    def grow(self, num_rows: int) -> None:
        added = num_rows - self._pool.num_rows
        pairs = zip(self._pool, self._fresh, strict=True)
        self._pool = Beams(*(torch.cat((a, b.expand(-1, added, -1)), dim=1) for a, b in pairs))
        self._history.grow(num_rows)

    @torch.inference_mode()
    def reset_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            for values, fresh in zip(self._pool, self._fresh, strict=True):
                values[:, row : row + 1].copy_(fresh)
        self._history.reset_rows(rows)

    @torch.inference_mode()
    def begin(self, frames_NTX: torch.Tensor, chunk: ChunkRows) -> Finish:
        log_probs_NTV = self._log_probs(frames_NTX)
        candidates = select_candidates(log_probs_NTV, self._settings)
        order = np.argsort(-chunk.num_frames, kind="stable")[: np.count_nonzero(chunk.num_frames)]
        if not np.array_equal(order, np.arange(log_probs_NTV.shape[0])):
            candidates = candidates.take_rows(self._to_device(order))
        chunk = ChunkRows(chunk.rows[order], chunk.num_frames[order], chunk.start_frames[order])
        row_N = self._to_device(chunk.rows)
        beams = Beams(*(x.index_select(1, row_N) for x in self._pool))
        bias = ChunkBias(self._scorers, chunk.rows, candidates.id_TNC) if self._scorers else None
        beams, records = run_frames(beams, candidates, chunk.active_rows(), bias)
        for values, new in zip(self._pool, beams, strict=True):
            values.index_copy_(1, row_N, new)
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
        """Raises StreamStateError for frames on a device of another type than the beams."""
        if frames_NTX.device.type != self._device.type:
            raise StreamStateError(
                f"log-probs are on {frames_NTX.device}, the decoder's states on {self._device}; "
                "make the decoder with device= that of the log-probs"
            )
        if self._settings.takes_log_probs:
            return frames_NTX
        return frames_NTX.float().log_softmax(dim=-1)

    def _to_device(self, indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(indices).to(self._device, non_blocking=True)

    def num_stable(self, row: int) -> int:
        return self._history.num_stable(row)

    def tail(self, row: int, skip: int) -> Tail:
        (best,) = self._history.hypotheses(row, 1, skip=skip)
        return Tail(best.tokens, self._history.num_stable(row))

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        return self._history.hypotheses(row, nbest, skip=skip)
