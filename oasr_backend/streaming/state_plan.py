"""Whether the declared states of all streams fit the memory: the model's under the settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from oasr_backend.cache.sizing import available_bytes
from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.config import ServingConfig
from oasr_backend.errors import ConfigError


def bytes_per_stream(specs: Sequence[StreamStateSpec], dtype: torch.dtype) -> int:
    """Of all its states; those without a type of their own are of `dtype`."""
    return sum(math.prod(spec.shape) * (spec.dtype or dtype).itemsize for spec in specs)


def check_state_memory(
    specs: Sequence[StreamStateSpec],
    config: ServingConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raises ConfigError with the arithmetic where the states of `max_streams` do not fit."""
    max_streams, each = config.step.max_streams, bytes_per_stream(specs, dtype)
    needed = max_streams * each
    budget_mib = config.cache.cpu_kv_budget_mib
    on_cpu = device.type == "cpu"
    available, words = available_bytes(device, budget_mib << 20 if on_cpu else None)
    if needed <= available:
        return
    need_mib = -(-needed >> 20)
    if on_cpu:
        limit, more = f"cpu_kv_budget_mib={budget_mib}", f"set cpu_kv_budget_mib={need_mib}"
    else:
        limit = f"{device} has {max(0, available) >> 20} MiB for them ({words}, in bytes)"
        more = "free memory of that GPU"
    raise ConfigError(
        f"the states of max_streams={max_streams} streams need {need_mib} MiB ({each} bytes each), "
        f"but {limit}; {more}, or lower max_streams{_or_less_history(config)}"
    )


def _or_less_history(config: ServingConfig) -> str:
    return " or num_left_chunks" if config.cache.num_left_chunks > 1 else ""
