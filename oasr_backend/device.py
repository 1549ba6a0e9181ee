"""Host data to the device without waiting for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
