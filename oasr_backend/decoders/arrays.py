"""Arrays by row: their types, and how they grow."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
ScalarT = TypeVar("ScalarT", bound=np.generic)

_FIRST_ROWS = 32


def doubled(num_rows: int, *, row: int) -> int:
    """How many rows an owner of `num_rows` should have so that `row` is one of them."""
    while num_rows <= row:
        num_rows = max(_FIRST_ROWS, 2 * num_rows)
    return num_rows


def more_rows(
    values: npt.NDArray[ScalarT], num_rows: int, *, fill: float = 0, axis: int = 0
) -> npt.NDArray[ScalarT]:
    """`values` with `num_rows` rows along `axis`; the new ones hold `fill`."""
    shape = list(values.shape)
    shape[axis] = num_rows - shape[axis]
    return np.concatenate((values, np.full(shape, fill, dtype=values.dtype)), axis=axis)
