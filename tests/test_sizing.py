"""How many blocks a memory budget buys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oasr_backend.cache import CacheConfig, bytes_per_kv_block, derive_max_num_blocks
from oasr_backend.cache.sizing import block_bytes, sized
from oasr_backend.errors import ConfigError

MIB = 1 << 20


def make_config(**changes: Any) -> CacheConfig:
    fields = {"max_num_blocks": None, "device": torch.device("cpu"), "dtype": torch.float16}
    return CacheConfig(**{**fields, **changes})


def test_a_default_block_takes_192_kib() -> None:
    assert block_bytes(make_config()) == 192 * 1024
    shape = {"num_layers": 1, "block_size_frames": 1, "n_kv_head": 1, "head_dim": 1}
    assert bytes_per_kv_block(**shape, dtype=torch.float32) == 8


def test_unlimited_history_takes_what_fits() -> None:
    assert derive_max_num_blocks(make_config(), budget_bytes=384 * MIB) == 2048


def test_unlimited_history_stops_at_what_the_tables_address() -> None:
    assert derive_max_num_blocks(make_config(), budget_bytes=1 << 40) == 32 * 512


def test_bounded_history_takes_exactly_the_peaks() -> None:
    config = make_config(num_left_chunks=4)
    assert derive_max_num_blocks(config, budget_bytes=1 << 40) == 160
    assert derive_max_num_blocks(config, budget_bytes=160 * 192 * 1024) == 160


def test_too_little_memory_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"at least 160 blocks of 196608 bytes .* hold 159"):
        derive_max_num_blocks(make_config(num_left_chunks=4), budget_bytes=160 * 192 * 1024 - 1)
    with pytest.raises(ConfigError, match="at least 256 blocks"):
        derive_max_num_blocks(make_config(), budget_bytes=0)


def test_a_cpu_needs_a_stated_budget() -> None:
    with pytest.raises(ConfigError, match="budget"):
        derive_max_num_blocks(make_config())


def test_sizing_fills_the_config_and_leaves_a_stated_number() -> None:
    assert sized(make_config(num_left_chunks=4), budget_bytes=1 << 40).max_num_blocks == 160
    stated = make_config(max_num_blocks=999)
    assert sized(stated) is stated


def test_free_device_memory_less_use_and_reserve_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (900 * MIB, 1000 * MIB))
    spent = derive_max_num_blocks(config, utilisation=0.9, reserve_bytes=100 * MIB)
    assert spent == 700 * MIB // (192 * 1024)
    with pytest.raises(ConfigError, match=r"0.5 \* 1048576000 total - .* in use - .* reserve"):
        derive_max_num_blocks(config, utilisation=0.5, reserve_bytes=390 * MIB)
    for utilisation in (0.0, 1.1):
        with pytest.raises(ConfigError, match="utilisation"):
            derive_max_num_blocks(config, utilisation=utilisation)
