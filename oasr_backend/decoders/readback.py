"""The step's one copy from the device to the host: begun at once, waited for later."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HostArray = npt.NDArray[np.int32]


def begin_copy(values: Tensor) -> Callable[[], HostArray]:
    """Begins to copy; the returned call waits for what the device had to do until here.

    Whatever is queued behind the copy runs on while the host works on what it got.
    """
    if not values.is_cuda:
        return values.numpy
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(values.device))

    def wait() -> HostArray:
        arrived.synchronize()
        array: HostArray = host.numpy()
        return array

    return wait
