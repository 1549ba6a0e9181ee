"""From the records of a chunk's frames to one int32 tensor, and to what the host's history follows.

A path has one alignment state, its slot. Where two pairs spell the same tokens, the more likely
one says when they were spoken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from oasr_backend.decoders.prefix_beam.trace import ChunkTrace, Int32Array, stack_frames
from oasr_backend.decoders.transducer.beam.frame import LOG_ZERO, PathBeams, PathRecord

_NO_TOKEN = -1


def pack_paths(
    records: Sequence[PathRecord], beams: PathBeams, score_NB: torch.Tensor, *, blank_id: int
) -> torch.Tensor:
    """Slots, tokens and log-probs of all frames, lengths of `beams` and scores: one int32 vector.

    `score_NB` are float64, with what scorers gave.
    """
    num_rows = score_NB.shape[0]
    # The fields get the frames T as their first axis.
    frames = PathRecord(*(stack_frames(field, num_rows) for field in zip(*records, strict=True)))
    is_blank_TNB = frames.token_NB == blank_id
    log_prob_TNB = frames.log_prob_NP.gather(2, frames.pick_NB).float()
    parts = (
        frames.slot_NB.int(),
        frames.token_NB.masked_fill(is_blank_TNB, _NO_TOKEN).int(),
        log_prob_TNB.masked_fill(is_blank_TNB, LOG_ZERO).view(torch.int32),
        beams.num_tokens.int(),
        score_NB.contiguous().view(torch.int32),
    )
    return torch.cat([part.flatten() for part in parts])


def unpack_paths(
    packed: Int32Array, shape_TNB: tuple[int, int, int], *, num_start_tokens: int
) -> ChunkTrace:
    """Ordered by score per token, where the tokens before every text count too."""
    _, rows, beam = shape_TNB
    size, cells = int(np.prod(shape_TNB)), rows * beam
    slot, token, log_prob, length, score = np.split(packed, np.cumsum([size, size, size, cells]))
    score_NB = score.copy().view(np.float64).reshape(rows, beam)
    trace = ChunkTrace(
        source_TNS=slot.reshape(shape_TNB).astype(np.int64),
        token_TNB=token.reshape(shape_TNB),
        log_prob_TNB=log_prob.view(np.float32).reshape(shape_TNB),
        alive_NS=score_NB > LOG_ZERO,
        best_state_NB=np.arange(beam).repeat(rows).reshape(beam, rows).T,
        score_NB=score_NB,
    )
    return trace.ranked(score_NB / (length.reshape(rows, beam) + num_start_tokens))
