"""Whether kernels can run, and the few numbers that their launches share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from oasr_backend.kernels.traced import is_traced

P = ParamSpec("P")
OutT = TypeVar("OutT")

#: A CPU build of PyTorch comes without Triton.
HAS_TRITON = find_spec("triton") is not None
#: Triton's interpreter runs kernels on CPU tensors; the tests use it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_kernel(x: Tensor) -> bool:
    """Whether an operation on `x` goes to its kernel rather than to its definition.

    A graph that is being written down holds definitions alone.
    """
    return HAS_TRITON and (x.is_cuda or INTERPRETED) and not is_traced()


def on_its_device(
    launch: Callable[Concatenate[Tensor, P], OutT],
) -> Callable[Concatenate[Tensor, P], OutT]:
    """Makes `launch` run where its first tensor lies.

    Triton launches on the thread's current GPU, which is the first one until somebody says other.
    """

    @wraps(launch)
    def launch_there(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> OutT:
        with torch.cuda.device_of(x):
            return launch(x, *args, **kwargs)

    return launch_there


def next_power_of_two(n: int, *, least: int = 1) -> int:
    """The smallest power of two that is >= n and >= `least`; tile sizes are such numbers."""
    return max(least, 1 << (n - 1).bit_length())


__all__ = ["HAS_TRITON", "INTERPRETED", "next_power_of_two", "on_its_device", "use_kernel"]
