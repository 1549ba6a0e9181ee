"""Triton kernel of `roll_rows`: one program a window and a few of its columns, all frames of them.

Shape letters: W windows (one a layer and row), L frames of a window, F new ones, X columns.
"""

from __future__ import annotations

from math import prod

import triton
import triton.language as tl
from torch import Tensor

from oasr_backend.kernels.launch import next_power_of_two, on_its_device

#: Elements of a program; it holds all that it moves in registers.
_ELEMENTS = 8192
_WARPS = 8
#: Columns of a program at least: a sector of memory, and at most, so that few are past the end.
_LEAST, _MOST = 16, 128


@triton.jit
def _roll_rows(
    buffer_ptr, slot_ptr, new_ptr, num_rows, num_slots,
    INNER: tl.constexpr, L: tl.constexpr, F: tl.constexpr, X: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0).to(tl.int64)
    inner, row = window % INNER, (window // INNER) % num_rows
    outer = window // INNER // num_rows
    slot = tl.load(slot_ptr + row)
    buffer_ptr += ((outer * num_slots + slot) * INNER + inner) * L * X
    new_ptr += window * F * X
    frame_L1 = tl.arange(0, BLOCK_L)[:, None]
    column_1X = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)[None, :]
    keep_LX = (frame_L1 < L) & (column_1X < X)
    source_L1 = frame_L1 + F
    old_LX = keep_LX & (source_L1 < L)
    new_LX = keep_LX & (source_L1 >= L)
    kept_LX = tl.load(buffer_ptr + source_L1 * X + column_1X, mask=old_LX, other=0.0)
    fresh_LX = tl.load(new_ptr + (source_L1 - L) * X + column_1X, mask=new_LX, other=0.0)
    moved_LX = tl.where(old_LX, kept_LX, fresh_LX.to(kept_LX.dtype))
    # Source and target overlap: nothing is stored before every thread has what it moves.
    tl.debug_barrier()
    tl.store(buffer_ptr + frame_L1 * X + column_1X, moved_LX, mask=keep_LX)


@on_its_device
def launch_roll_rows(
    buffer: Tensor, slot_ids: Tensor, new: Tensor, slot_axis: int, axis: int
) -> None:
    new = new.contiguous()
    num_slots, num_rows = buffer.shape[slot_axis], slot_ids.shape[0]
    outer, inner = prod(buffer.shape[:slot_axis]), prod(buffer.shape[slot_axis + 1 : axis])
    frames, columns = buffer.shape[axis], prod(buffer.shape[axis + 1 :])
    block_frames = next_power_of_two(frames)
    block_columns = min(max(_LEAST, _ELEMENTS // block_frames), _MOST, next_power_of_two(columns))
    _roll_rows[(outer * num_rows * inner, triton.cdiv(columns, block_columns))](
        buffer, slot_ids, new, num_rows, num_slots,
        INNER=inner, L=frames, F=new.shape[axis], X=columns,
        BLOCK_L=block_frames, BLOCK_X=block_columns, num_warps=_WARPS,
    )  # fmt: skip
