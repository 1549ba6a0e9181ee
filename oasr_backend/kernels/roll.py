"""Sliding windows of many streams, moved on where they are stored.

Shape letters: N any layers, S slots, B rows, L frames of a window, F new frames, X values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel
from oasr_backend.kernels.precision import cast
from oasr_backend.kernels.traced import static


def roll_rows(buffer: Tensor, slot_ids: Tensor, new: Tensor, slot_axis: int, axis: int) -> None:
    """In place: rows `slot_ids` (B,) int64 of `buffer` drop their oldest frames and take `new`.

    `slot_axis` counts slots, or rows in `new`; `axis` counts frames, and `new` has other ones
    there than `buffer`. A slot is in `slot_ids` once, or its content is any of those given.
    """
    in_place = axis > slot_axis and buffer.is_contiguous()
    if in_place and use_kernel(buffer):
        from oasr_backend.kernels.roll_kernel import launch_roll_rows

        launch_roll_rows(buffer, slot_ids, new, slot_axis, axis)
    elif in_place and buffer.device.type == "cpu" and buffer.dtype != torch.bfloat16:
        _roll_rows_on_host(buffer, slot_ids, new, slot_axis, axis)
    else:  # NumPy knows no bfloat16.
        roll_rows_definition(buffer, slot_ids, new, slot_axis, axis)


def roll_rows_definition(
    buffer: Tensor, slot_ids: Tensor, new: Tensor, slot_axis: int, axis: int
) -> None:
    rows = rolled(buffer.index_select(slot_axis, slot_ids), new, axis)
    buffer.index_copy_(slot_axis, slot_ids, cast(rows, buffer.dtype))


def _roll_rows_on_host(
    buffer: Tensor, slot_ids: Tensor, new: Tensor, slot_axis: int, axis: int
) -> None:
    """Each window is one run of memory, which moves within itself."""
    shape, size, num_new = buffer.shape, buffer.shape[axis], new.shape[axis]
    if num_new > size:
        new = new.narrow(axis, num_new - size, size)
    if 0 < num_new < size:
        outer, inner = math.prod(shape[:slot_axis]), math.prod(shape[slot_axis + 1 : axis])
        columns = math.prod(shape[axis + 1 :])
        stored_NSIX = buffer.numpy().reshape(outer, shape[slot_axis], inner, size * columns)
        moved = num_new * columns
        for slot in set(slot_ids.tolist()):
            for windows_IX in stored_NSIX[:, slot]:
                for window_X in windows_IX:
                    # NumPy moves a run in one dimension as if through a copy, without one.
                    window_X[:-moved] = window_X[moved:]
    if num_new:
        newest = buffer.narrow(axis, max(0, size - num_new), min(size, num_new))
        newest.index_copy_(slot_axis, slot_ids, cast(new.detach(), buffer.dtype))


def rolled(rows: Tensor, new: Tensor, axis: int) -> Tensor:
    """A sliding window with `new` frames at its end and as many of its oldest gone."""
    size, num_new = static(rows.shape[axis]), static(new.shape[axis])
    if num_new >= size:
        return new.narrow(axis, num_new - size, size)
    kept = rows.narrow(axis, num_new, size - num_new)
    return torch.cat((kept, cast(new, rows.dtype)), dim=axis)
