"""Memory on the device, and host data on its way there without waiting for it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the thread's current one: pinned memory, among others, belongs to that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(host: NDArray[np.generic], device: torch.device) -> Tensor:
    """One staged copy. A pageable copy to a CUDA device would wait for all work queued there."""
    staged = torch.from_numpy(np.ascontiguousarray(host))
    if torch.device(device).type == "cuda":
        return staged.pin_memory().to(device, non_blocking=True)
    return staged.to(device)


def reserved_zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, of which a CPU gives only the pages that are written, when they are.

    For buffers with room for every stream that may come.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not num_bytes:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    # The kernel gives new pages as zeros; the tensor keeps the mapping alive.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        # A row of a stream is far smaller than a huge page, of which each row would take one.
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
