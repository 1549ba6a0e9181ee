"""Triton kernel of `best_tokens`: one program a frame, one pass over its scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import next_power_of_two, on_its_device

_MAX_TILE = 2048


@triton.jit
def _best_tokens(
    scores_ptr, id_ptr, log_prob_ptr, V: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    frame = tl.program_id(0).to(tl.int64)
    best = tl.full((), -float("inf"), dtype=tl.float32)
    best_id = tl.full((), 0, dtype=tl.int32)
    mass = tl.full((), 0.0, dtype=tl.float32)
    for begin in range(0, V, BLOCK_V):
        token_V = begin + tl.arange(0, BLOCK_V)
        score_V = tl.load(
            scores_ptr + frame * V + token_V, mask=token_V < V, other=-float("inf")
        ).to(tl.float32)
        tile_best, tile_id = tl.max(score_V, axis=0, return_indices=True)
        new_best = tl.maximum(best, tile_best)
        mass = mass * tl.exp(best - new_best) + tl.sum(tl.exp(score_V - new_best), axis=0)
        best_id = tl.where(tile_best > best, begin + tile_id, best_id)
        best = new_best
    tl.store(id_ptr + frame, best_id)
    tl.store(log_prob_ptr + frame, -tl.log(mass))


@on_its_device
def launch_best_tokens(scores_BTV: Tensor) -> Tensor:
    batch, num_frames, vocab_size = scores_BTV.shape
    packed_2BT = torch.empty((2, batch, num_frames), dtype=torch.int32, device=scores_BTV.device)
    _best_tokens[(batch * num_frames,)](
        scores_BTV.contiguous(), packed_2BT[0], packed_2BT[1].view(torch.float32),
        V=vocab_size, BLOCK_V=min(_MAX_TILE, next_power_of_two(vocab_size)),
    )  # fmt: skip
    return packed_2BT
