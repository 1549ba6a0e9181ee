"""CTC prefix beam search over many streams at once, in tensor operations per frame.

A prefix keeps two log-probs, of its alignments that end in blank and of those that end in its last
token (Hannun et al., "First-pass large vocabulary continuous speech recognition", 2014). Each frame
extends the beam by the frame's W best tokens only; blank and a repeated last token count only when
they are among them, as in WeNet's search. Beside each sum over alignments runs the best single
alignment, which dates the tokens.

Prefixes are told apart by 64-bit hashes: an extension whose (parent hash, token) is already in the
beam is counted there. Equal totals keep the order (rank of the parent prefix, the prefix itself
before its extensions, rank of the token in its frame).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from oasr_backend.decoders.base import ChunkRows
from oasr_backend.decoders.beam_history import BeamHistory, ChunkTrace
from oasr_backend.decoders.config import GpuDecoderConfig
from oasr_backend.types import Hypothesis

_LOG_ZERO = float("-inf")
_EMPTY_HASH = 0x2545F4914F6CDD1D
_NO_PARENT = -0x61C8864680B583EB
_HASH_FACTOR = 0x5851F42D4C957F2D
_TOKEN_FACTOR = -0x40A7B892E31B1A47
_NO_TOKEN = -1


class Candidates(NamedTuple):
    """The W best tokens of each frame. Log-probs are float64; -inf where a token does not count."""

    ids_TNC: torch.Tensor  # column 0 stands for "no token" (-1), then W ids
    extend_TNW: torch.Tensor  # -inf for blank
    blank_TN: torch.Tensor  # -inf when blank is not among the W
    skip_TN: torch.Tensor | None  # frames that only collapse the pairs


class Beams(NamedTuple):
    """N beams of B prefixes. Axis "2" is (sum over alignments, best alignment), float64 logs."""

    blank_2NB: torch.Tensor
    token_2NB: torch.Tensor
    total_2NB: torch.Tensor
    hash_NB: torch.Tensor
    parent_NB: torch.Tensor
    last_NB: torch.Tensor

    def rows(self, start: int, stop: int) -> Beams:
        return Beams(*(x.narrow(-2, start, stop - start) for x in self))


class Merge(NamedTuple):
    """How each prefix of the beam goes on without growing, and which extensions it absorbs."""

    token_2NB: torch.Tensor
    last_log_prob_NB: torch.Tensor
    is_last_NBW: torch.Tensor
    absorbed_NBW: torch.Tensor  # extensions that are counted in the prefix they equal
    source_NB: torch.Tensor  # alignment state that the best token alignment comes from
    appended_NB: torch.Tensor  # whether that alignment adds the last token in this frame


def select_candidates(log_probs_NTV: torch.Tensor, config: GpuDecoderConfig) -> Candidates:
    """One top-k for the whole chunk. Equal log-probs rank as torch.topk ranks them."""
    width = min(config.token_candidates, log_probs_NTV.shape[2])
    best_NTW, ids_NTW = log_probs_NTV.float().topk(width, dim=-1)
    best_TNW = best_NTW.transpose(0, 1).double()
    ids_TNW = ids_NTW.transpose(0, 1)
    is_blank_TNW = ids_TNW == config.blank_id
    skip_TN = None
    if config.blank_threshold < 1.0:
        blank_TN = log_probs_NTV[:, :, config.blank_id].float().transpose(0, 1)
        skip_TN = blank_TN.exp() > config.blank_threshold
    return Candidates(
        ids_TNC=F.pad(ids_TNW, (1, 0), value=_NO_TOKEN),
        extend_TNW=best_TNW.masked_fill(is_blank_TNW, _LOG_ZERO),
        blank_TN=best_TNW.masked_fill(~is_blank_TNW, _LOG_ZERO).amax(-1),
        skip_TN=skip_TN,
    )


def merge_repeats(beams: Beams, ids_NW: torch.Tensor, extend_NW: torch.Tensor) -> Merge:
    """Repeat each prefix's last token, and add what its parent's extension by it brings."""
    beam = beams.last_NB.shape[1]
    is_last_NBW = beams.last_NB[:, :, None] == ids_NW[:, None, :]
    last_NB = torch.where(is_last_NBW, extend_NW[:, None, :], _LOG_ZERO).amax(-1)
    is_parent_NBB = beams.parent_NB[:, :, None] == beams.hash_NB[:, None, :]
    has_parent_NB, parent_NB = is_parent_NBB.to(torch.uint8).max(-1)
    best_state_NB = _best_state(beams)
    doubled_NB = beams.last_NB.gather(1, parent_NB) == beams.last_NB
    parent_2NB = parent_NB.expand(2, -1, -1)
    brought_2NB = torch.where(
        doubled_NB, beams.blank_2NB.gather(2, parent_2NB), beams.total_2NB.gather(2, parent_2NB)
    )
    brought_2NB = torch.where(has_parent_NB.bool(), brought_2NB + last_NB, _LOG_ZERO)
    repeated_2NB = beams.token_2NB + last_NB
    appended_NB = brought_2NB[1] > repeated_2NB[1]
    slot_B = torch.arange(beam, device=ids_NW.device)
    parent_state_NB = torch.where(doubled_NB, parent_NB, best_state_NB.gather(1, parent_NB))
    return Merge(
        token_2NB=_add_alignments(repeated_2NB, brought_2NB),
        last_log_prob_NB=last_NB,
        is_last_NBW=is_last_NBW,
        absorbed_NBW=_absorbed(has_parent_NB, parent_NB, is_last_NBW),
        source_NB=torch.where(appended_NB, parent_state_NB, slot_B + beam),
        appended_NB=appended_NB,
    )


def _best_state(beams: Beams) -> torch.Tensor:
    """State of each slot's best alignment: slot (ends in blank) or B + slot (in its token)."""
    beam = beams.last_NB.shape[1]
    ends_in_token_NB = beams.token_2NB[1] > beams.blank_2NB[1]
    return torch.arange(beam, device=ends_in_token_NB.device) + beam * ends_in_token_NB


def _add_alignments(a_2NB: torch.Tensor, b_2NB: torch.Tensor) -> torch.Tensor:
    return torch.stack((torch.logaddexp(a_2NB[0], b_2NB[0]), torch.maximum(a_2NB[1], b_2NB[1])))


def _absorbed(
    has_parent_NB: torch.Tensor, parent_NB: torch.Tensor, is_last_NBW: torch.Tensor
) -> torch.Tensor:
    n, beam, width = is_last_NBW.shape
    is_candidate_NB, column_NB = is_last_NBW.to(torch.uint8).max(-1)
    target_NB = parent_NB * width + column_NB
    # The entry past the end takes what must not be marked.
    target_NB = torch.where((has_parent_NB & is_candidate_NB).bool(), target_NB, beam * width)
    marked = torch.zeros((n, beam * width + 1), dtype=torch.bool, device=parent_NB.device)
    return marked.scatter_(1, target_NB, True)[:, :-1].view(n, beam, width)


def beam_step(
    beams: Beams, ids_NC: torch.Tensor, extend_NW: torch.Tensor, blank_N: torch.Tensor
) -> tuple[Beams, torch.Tensor]:
    """One frame. The trace int32 (4, N, B) is (source of blank state, source of token state,
    token appended or -1, bits of the fp32 log-prob of the last token) per new slot.
    """
    merge = merge_repeats(beams, ids_NC[:, 1:], extend_NW)
    blank_2NB = beams.total_2NB + blank_N[:, None]
    grown_2NBW = torch.where(
        merge.is_last_NBW, beams.blank_2NB[..., None], beams.total_2NB[..., None]
    )
    grown_2NBW = grown_2NBW + extend_NW[:, None, :]
    stay_NB = torch.logaddexp(blank_2NB[0], merge.token_2NB[0])
    grown_NBW = grown_2NBW[0].masked_fill(merge.absorbed_NBW, _LOG_ZERO)
    totals_NP = torch.cat((stay_NB[..., None], grown_NBW), -1).flatten(1)
    beam, columns = beams.last_NB.shape[1], ids_NC.shape[1]
    best_NP, order_NP = totals_NP.sort(dim=-1, descending=True, stable=True)
    best_NB, pick_NB = best_NP[:, :beam], order_NP[:, :beam]
    slot_NB, column_NB = pick_NB // columns, pick_NB % columns
    token_2NP = torch.cat((merge.token_2NB[..., None], grown_2NBW), -1).flatten(2)
    token_2NB = token_2NP.gather(2, pick_NB.expand(2, -1, -1))
    stays_NB = column_NB == 0
    kept_2NB = blank_2NB.gather(2, slot_NB.expand(2, -1, -1))
    kept_2NB = torch.where(stays_NB, kept_2NB, _LOG_ZERO)
    last_NB = torch.where(stays_NB, beams.last_NB.gather(1, slot_NB), ids_NC.gather(1, column_NB))
    hash_NB = beams.hash_NB.gather(1, slot_NB)
    picked = Beams(
        blank_2NB=kept_2NB,
        token_2NB=token_2NB,
        total_2NB=torch.stack((best_NB, torch.maximum(kept_2NB[1], token_2NB[1]))),
        hash_NB=torch.where(stays_NB, hash_NB, extend_hash(hash_NB, last_NB)),
        parent_NB=torch.where(stays_NB, beams.parent_NB.gather(1, slot_NB), hash_NB),
        last_NB=last_NB,
    )
    trace = _trace(beams, merge, extend_NW, (pick_NB, slot_NB, stays_NB), last_NB)
    return picked, trace


def extend_hash(hash_NB: torch.Tensor, token_NB: torch.Tensor) -> torch.Tensor:
    """Hash of prefix + token; int64 arithmetic wraps."""
    mixed_NB = (hash_NB ^ ((token_NB + 1) * _TOKEN_FACTOR)) * _HASH_FACTOR
    return mixed_NB ^ (mixed_NB >> 29)


def _trace(
    beams: Beams,
    merge: Merge,
    extend_NW: torch.Tensor,
    pick: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    last_NB: torch.Tensor,
) -> torch.Tensor:
    pick_NB, slot_NB, stays_NB = pick
    best_state_NB = _best_state(beams)
    slot_B1 = torch.arange(slot_NB.shape[1], device=slot_NB.device)[:, None]
    grown_NBW = torch.where(merge.is_last_NBW, slot_B1, best_state_NB[..., None])
    source_NP = torch.cat((merge.source_NB[..., None], grown_NBW), -1).flatten(1)
    log_prob_NBW = extend_NW[:, None, :].expand_as(grown_NBW)
    log_prob_NP = torch.cat((merge.last_log_prob_NB[..., None], log_prob_NBW), -1).flatten(1)
    appended_NB = ~stays_NB | merge.appended_NB.gather(1, slot_NB)
    return torch.stack(
        (
            best_state_NB.gather(1, slot_NB).int(),
            source_NP.gather(1, pick_NB).int(),
            torch.where(appended_NB, last_NB, _NO_TOKEN).int(),
            log_prob_NP.gather(1, pick_NB).float().view(torch.int32),
        )
    )


def skip_frame(
    beams: Beams, stepped: tuple[Beams, torch.Tensor], skip_N: torch.Tensor
) -> tuple[Beams, torch.Tensor]:
    """Rows with `skip_N` keep their prefixes; both log-probs collapse into "ends in blank"."""
    collapsed = beams._replace(
        blank_2NB=beams.total_2NB, token_2NB=torch.full_like(beams.total_2NB, _LOG_ZERO)
    )
    source_NB = _best_state(beams).int()
    none_NB = torch.full_like(source_NB, _NO_TOKEN)
    log_zero_NB = none_NB.float().fill_(_LOG_ZERO).view(torch.int32)
    trace = torch.stack((source_NB, source_NB, none_NB, log_zero_NB))
    skip_N1 = skip_N[:, None]
    kept = (torch.where(skip_N1, a, b) for a, b in zip(collapsed, stepped[0], strict=True))
    return Beams(*kept), torch.where(skip_N1, trace, stepped[1])


def run_frames(
    beams: Beams, candidates: Candidates, active_rows: Sequence[int]
) -> tuple[Beams, torch.Tensor]:
    """All frames of a chunk; frame t moves the first `active_rows[t]` rows (never increasing).

    Returns the beams and the traces int32 (T, 4, N, B), zero where a row was not active.
    """
    total_rows = beams.last_NB.shape[0]
    finished: list[Beams] = []
    traces: list[torch.Tensor] = []
    for t, n in enumerate(active_rows):
        if n < beams.last_NB.shape[0]:
            finished.append(beams.rows(n, beams.last_NB.shape[0]))
            beams = beams.rows(0, n)
        ids_NC, extend_NW = candidates.ids_TNC[t, :n], candidates.extend_TNW[t, :n]
        stepped = beam_step(beams, ids_NC, extend_NW, candidates.blank_TN[t, :n])
        if candidates.skip_TN is not None:
            stepped = skip_frame(beams, stepped, candidates.skip_TN[t, :n])
        beams, trace = stepped
        traces.append(F.pad(trace, (0, 0, 0, total_rows - n)) if n < total_rows else trace)
    if finished:
        parts = zip(beams, *reversed(finished), strict=True)
        beams = Beams(*(torch.cat(part, dim=-2) for part in parts))
    return beams, torch.stack(traces)


class PrefixBeamSearch:
    """Implements CtcSearch. Scores and hashes stay on the device, tokens and times on the host."""

    def __init__(self, config: GpuDecoderConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        beam = config.beam_size
        self._logs_6RB = torch.empty((6, 0, beam), dtype=torch.float64, device=device)
        self._ints_3RB = torch.empty((3, 0, beam), dtype=torch.int64, device=device)
        self._fresh = _fresh_beam(beam, device)
        self._history = BeamHistory(beam)

    def grow(self, num_rows: int) -> None:
        added = num_rows - self._ints_3RB.shape[1]
        logs_61B, ints_31B = self._fresh
        self._logs_6RB = torch.cat((self._logs_6RB, logs_61B.expand(-1, added, -1)), dim=1)
        self._ints_3RB = torch.cat((self._ints_3RB, ints_31B.expand(-1, added, -1)), dim=1)
        self._history.grow(num_rows)

    def reset_rows(self, rows: Sequence[int]) -> None:
        logs_61B, ints_31B = self._fresh
        for row in rows:
            self._logs_6RB[:, row : row + 1].copy_(logs_61B)
            self._ints_3RB[:, row : row + 1].copy_(ints_31B)
        self._history.reset_rows(rows)

    def advance(self, log_probs_NTV: torch.Tensor, chunk: ChunkRows) -> None:
        candidates = select_candidates(log_probs_NTV, self._config)
        order = np.argsort(-chunk.num_frames, kind="stable")[: np.count_nonzero(chunk.num_frames)]
        chunk = ChunkRows(chunk.rows[order], chunk.num_frames[order], chunk.start_frames[order])
        if len(order) < log_probs_NTV.shape[0] or np.any(np.diff(order) != 1):
            candidates = _take_rows(candidates, torch.from_numpy(order).to(self._device))
        rows_N = torch.from_numpy(chunk.rows).to(self._device)
        frame_T = np.arange(log_probs_NTV.shape[1])
        active_rows = (chunk.num_frames > frame_T[:, None]).sum(1).tolist()
        beams, traces = run_frames(self._load(rows_N), candidates, active_rows)
        self._store(rows_N, beams)
        self._history.extend(
            ChunkTrace.from_packed(pack(beams, traces).cpu().numpy(), traces.shape), chunk
        )

    def _load(self, rows_N: torch.Tensor) -> Beams:
        logs_6NB = self._logs_6RB.index_select(1, rows_N)
        ints_3NB = self._ints_3RB.index_select(1, rows_N)
        return Beams(logs_6NB[0:2], logs_6NB[2:4], logs_6NB[4:6], *ints_3NB.unbind(0))

    def _store(self, rows_N: torch.Tensor, beams: Beams) -> None:
        logs_6NB = torch.cat((beams.blank_2NB, beams.token_2NB, beams.total_2NB))
        ints_3NB = torch.stack((beams.hash_NB, beams.parent_NB, beams.last_NB))
        self._logs_6RB.index_copy_(1, rows_N, logs_6NB)
        self._ints_3RB.index_copy_(1, rows_N, ints_3NB)

    def num_stable(self, row: int) -> int:
        return self._history.num_stable(row)

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        return self._history.hypotheses(row, nbest, skip=skip)


def pack(beams: Beams, traces_T4NB: torch.Tensor) -> torch.Tensor:
    """Everything the host needs of a chunk in one int32 tensor, for one copy."""
    live_4NB = torch.cat((beams.blank_2NB, beams.token_2NB))[1::2] > _LOG_ZERO
    flags_NB = live_4NB[0].int() + 2 * live_4NB[1].int()
    flags_NB = flags_NB + 4 * (beams.token_2NB[1] > beams.blank_2NB[1]).int()
    scores = beams.total_2NB[0].contiguous().view(torch.int32)
    return torch.cat((traces_T4NB.flatten(), flags_NB.flatten(), scores.flatten()))


def _take_rows(candidates: Candidates, order_N: torch.Tensor) -> Candidates:
    skip_TN = candidates.skip_TN
    return Candidates(
        ids_TNC=candidates.ids_TNC.index_select(1, order_N),
        extend_TNW=candidates.extend_TNW.index_select(1, order_N),
        blank_TN=candidates.blank_TN.index_select(1, order_N),
        skip_TN=None if skip_TN is None else skip_TN.index_select(1, order_N),
    )


def _fresh_beam(beam: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot 0 holds the empty prefix; the others are dead and equal no prefix that can occur."""
    logs_61B = torch.full((6, 1, beam), _LOG_ZERO, dtype=torch.float64)
    logs_61B[[0, 1, 4, 5], 0, 0] = 0.0
    ints_31B = torch.full((3, 1, beam), _NO_TOKEN, dtype=torch.int64)
    ints_31B[0, 0] = _EMPTY_HASH + torch.arange(beam)
    ints_31B[1, 0] = _NO_PARENT
    return logs_61B.to(device), ints_31B.to(device)
