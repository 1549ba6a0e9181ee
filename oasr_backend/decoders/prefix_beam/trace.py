"""From the records of a chunk's frames to one int32 tensor that the host can follow.

In the CTC search a slot has two alignment states: its best alignment that ends in blank (state =
slot) and its best one that ends in the last token (state = B + slot).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from oasr_backend.decoders.arrays import IntArray
from oasr_backend.decoders.prefix_beam.frame import LOG_ZERO, NO_TOKEN, Beams, FrameRecord

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ChunkTrace:
    """T frames of N rows on the host; S alignment states, of which the last B may append.

    Frames past a row's end are void.
    """

    source_TNS: IntArray  # the state that each state comes from
    token_TNB: Int32Array  # what the appending state of a slot appends, or -1
    log_prob_TNB: FloatArray  # of the slot's last token in this frame; -inf where it has none
    alive_NS: npt.NDArray[np.bool_]
    best_state_NB: IntArray
    score_NB: npt.NDArray[np.float64]

    @classmethod
    def from_packed(cls, packed: Int32Array, shape_TNB: tuple[int, int, int]) -> ChunkTrace:
        frames, rows, beam = shape_TNB
        cells = rows * beam
        source_2, token, log_prob, flags, score = np.split(
            packed, np.cumsum([2 * frames * cells, frames * cells, frames * cells, cells])
        )
        flags_NB = flags.reshape(rows, beam)
        return cls(
            source_TNS=source_2.reshape(frames, rows, 2 * beam).astype(np.int64),
            token_TNB=token.reshape(frames, rows, beam),
            log_prob_TNB=log_prob.view(np.float32).reshape(frames, rows, beam),
            alive_NS=np.concatenate((flags_NB & 1, flags_NB & 2), axis=1) > 0,
            best_state_NB=np.arange(beam) + beam * (flags_NB >> 2),
            score_NB=score.copy().view(np.float64).reshape(rows, beam),
        )

    def ranked(self, rank_NB: npt.NDArray[np.float64] | None = None) -> ChunkTrace:
        """The slots' final states and scores by falling `rank_NB`, or score.

        Where something else ordered the beam on its way.
        """
        rank_NB = self.score_NB if rank_NB is None else rank_NB
        order_NB = np.argsort(-rank_NB, axis=1, kind="stable")
        return replace(
            self,
            best_state_NB=np.take_along_axis(self.best_state_NB, order_NB, axis=1),
            score_NB=np.take_along_axis(self.score_NB, order_NB, axis=1),
        )


def pack_chunk(
    records: Sequence[FrameRecord],
    beams: Beams,
    score_NB: torch.Tensor,
    *,
    id_TNC: torch.Tensor,
    extend_TNC: torch.Tensor,
) -> torch.Tensor:
    """Sources, tokens, log-probs of all frames, flags of `beams` and scores: one int32 vector."""
    # The fields get the frames T as their first axis.
    num_rows = beams.num_rows
    frames = FrameRecord(*(stack_frames(field, num_rows) for field in zip(*records, strict=True)))
    columns = id_TNC.shape[2]
    slot_TNB, column_TNB = frames.pick_NB // columns, frames.pick_NB % columns
    stays_TNB = column_TNB == 0
    last_TNB = frames.ints_3NB[:, 2].gather(2, slot_TNB)
    token_TNB = torch.where(stays_TNB, last_TNB, id_TNC.gather(2, column_TNB))
    appended_TNB = (frames.brought_2NB[:, 1] > frames.held_2NB[:, 1]).gather(
        2, slot_TNB
    ) | ~stays_TNB
    own_column_TNB = torch.where(stays_TNB, frames.column_NB.gather(2, slot_TNB), column_TNB)
    repeats_TNB = ~stays_TNB & (token_TNB == last_TNB)
    parts = (
        torch.cat(_sources(frames, slot_TNB, stays_TNB, repeats_TNB), dim=-1).int(),
        torch.where(appended_TNB, token_TNB, NO_TOKEN).int(),
        extend_TNC.gather(2, own_column_TNB).float().view(torch.int32),
        _flags(beams),
        score_NB.contiguous().view(torch.int32),
    )
    return torch.cat([part.flatten() for part in parts])


def stack_frames(field: tuple[torch.Tensor, ...], num_rows: int) -> torch.Tensor:
    """T frames (..., N, X) along a new first axis; rows that a frame does not move are 0."""
    missing = [num_rows - x.shape[-2] for x in field]
    padded = [F.pad(x, (0, 0, 0, n)) if n else x for x, n in zip(field, missing, strict=True)]
    return torch.stack(padded)


def _sources(
    frames: FrameRecord, slot_TNB: torch.Tensor, stays_TNB: torch.Tensor, repeats_TNB: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the best alignments of each new slot come from: (its blank state, its token state)."""
    beam = slot_TNB.shape[2]
    own_B = torch.arange(beam, device=slot_TNB.device)
    best_TNB = own_B + beam * (frames.token_2NB[:, 1] > frames.blank_2NB[:, 1])
    # Only alignments that end in blank may add the same token again.
    parent_TNB = torch.where(
        frames.doubled_NB, frames.parent_NB, best_TNB.gather(2, frames.parent_NB)
    )
    stay_TNB = torch.where(
        frames.brought_2NB[:, 1] > frames.held_2NB[:, 1], parent_TNB, own_B + beam
    )
    best_of_slot_TNB = best_TNB.gather(2, slot_TNB)
    grown_TNB = torch.where(repeats_TNB, slot_TNB, best_of_slot_TNB)
    return best_of_slot_TNB, torch.where(stays_TNB, stay_TNB.gather(2, slot_TNB), grown_TNB)


def _flags(beams: Beams) -> torch.Tensor:
    """Bit 0: the blank state is alive. Bit 1: the token state is. Bit 2: the latter is better."""
    blank_NB, token_NB = beams.blank_2NB[1], beams.token_2NB[1]
    alive_NB = (blank_NB > LOG_ZERO).int() + 2 * (token_NB > LOG_ZERO).int()
    return alive_NB + 4 * (token_NB > blank_NB).int()
