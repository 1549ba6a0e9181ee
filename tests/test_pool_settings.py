"""The K/V pool under the server's settings: an error names the settings that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oasr_backend.cache import CacheConfig, StreamStateSpec
from oasr_backend.config import ServingConfig
from oasr_backend.errors import ConfigError
from oasr_backend.models import AttentionSpec, EncoderSpec, TrainedWindow
from oasr_backend.streaming.kv_plan import plan_kv
from oasr_backend.streaming.state_plan import check_state_memory

MIB = 1 << 20
#: A block of 16 frames takes 2 * 12 * 16 * 4 * 64 * 4 bytes = 384 KiB, a stream holds five.
ATTENTION = AttentionSpec(num_layers=12, num_kv_heads=4, head_dim=64)
CPU = torch.device("cpu")


def planned(config: ServingConfig, attention: AttentionSpec, device: torch.device) -> CacheConfig:
    spec = EncoderSpec(256, 4, 6, attention, chunk_frames=config.cache.chunk_size)
    plan = plan_kv(config, spec, device=device, dtype=torch.float32)
    assert plan is not None
    return plan


def pool_blocks(device: torch.device = CPU, **settings: Any) -> int:
    config = ServingConfig.of(**settings).with_defaults(on_gpu=device.type == "cuda")
    return planned(config, ATTENTION, device).pool_blocks


def refusal(device: torch.device = CPU, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        pool_blocks(device, **settings)
    text = str(caught.value)
    assert "max_batch_size" not in text
    return text


def test_the_pool_is_what_its_streams_need() -> None:
    assert pool_blocks(max_streams=10) == 50
    assert pool_blocks(max_streams=10, max_num_blocks=99) == 99


@pytest.mark.parametrize(
    "settings",
    [
        {"max_streams": 20000},
        {"cpu_kv_budget_mib": 1},
        {"cpu_kv_budget_mib": 1, "num_left_chunks": -1},
        {"cpu_kv_budget_mib": 1, "num_left_chunks": 0, "max_streams": 10},
    ],
)
def test_too_small_a_budget_names_one_that_is_enough(settings: dict[str, int]) -> None:
    text = refusal(**settings)
    config = ServingConfig.of(**settings).with_defaults(on_gpu=False)
    assert f"max_streams={config.step.max_streams} streams" in text
    assert f"but cpu_kv_budget_mib={config.cache.cpu_kv_budget_mib}; set cpu_kv_budget_mib=" in text
    enough = int(text.rpartition("set cpu_kv_budget_mib=")[2].partition(",")[0])
    assert pool_blocks(**{**settings, "cpu_kv_budget_mib": enough}) >= config.step.max_streams
    assert refusal(**{**settings, "cpu_kv_budget_mib": enough - 1})


@pytest.mark.parametrize("num_left_chunks", [4, 0, -1])
def test_too_few_stated_blocks_are_refused_with_the_number_that_is_enough(
    num_left_chunks: int,
) -> None:
    text = refusal(max_num_blocks=1, num_left_chunks=num_left_chunks)
    assert "max_num_blocks=1 is less than the " in text
    assert "max_streams=256 streams need" in text
    enough = int(text.partition("less than the ")[2].partition(" ")[0])
    settings = {"num_left_chunks": num_left_chunks}
    assert pool_blocks(max_num_blocks=enough, **settings) == enough
    assert refusal(max_num_blocks=enough - 1, **settings)


@pytest.mark.parametrize(
    ("num_left_chunks", "way_out"),
    [
        (4, "or lower max_streams or num_left_chunks"),
        (0, "or lower max_streams"),
        (-1, "or lower max_streams or bound the history with num_left_chunks"),
    ],
)
def test_the_ways_out_are_those_that_are_left(num_left_chunks: int, way_out: str) -> None:
    assert refusal(cpu_kv_budget_mib=1, num_left_chunks=num_left_chunks).endswith(f", {way_out}")
    assert refusal(max_num_blocks=1, num_left_chunks=num_left_chunks).endswith(f", {way_out}")


def test_a_gpu_without_room_is_told_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (600 * MIB, 1000 * MIB))
    text = refusal(torch.device("cuda:1"), max_streams=200)
    assert "cuda:1 has 244 MiB for it" in text
    assert "free memory of that GPU" in text
    assert "cpu_kv_budget_mib" not in text
    assert pool_blocks(torch.device("cuda:1"), max_streams=100) == 500


def test_no_setting_of_the_history_changes_a_trained_window() -> None:
    attention = AttentionSpec(
        num_layers=12, num_kv_heads=4, head_dim=64, span=TrainedWindow(frames=70)
    )
    for num_left_chunks in (-1, 0, 400):
        config = ServingConfig.of(max_streams=2, num_left_chunks=num_left_chunks)
        plan = planned(config.with_defaults(on_gpu=False), attention, CPU)
        assert plan.max_cache_frames == plan.prefilled_cache_frames == 70
        assert plan.pool_blocks == 2 * 6


def test_states_that_do_not_fit_are_told_with_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [
        StreamStateSpec("window", (2, 128, 512)),
        StreamStateSpec("age", (), dtype=torch.int32),
    ]
    config = ServingConfig.of(max_streams=100).with_defaults(on_gpu=False)
    check_state_memory(specs, config, device=CPU, dtype=torch.float32)
    less = config.changed(cpu_kv_budget_mib=50)
    with pytest.raises(ConfigError) as caught:
        check_state_memory(specs, less, device=CPU, dtype=torch.float32)
    text = str(caught.value)
    assert "max_streams=100 streams need 51 MiB (524292 bytes each)" in text
    assert "set cpu_kv_budget_mib=51, or lower max_streams or num_left_chunks" in text
    check_state_memory(specs, less, device=CPU, dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (300 * MIB, 1000 * MIB))
    with pytest.raises(ConfigError, match="cuda:0 has 0 MiB for them"):
        check_state_memory(specs, config, device=torch.device("cuda:0"), dtype=torch.float32)


@pytest.mark.parametrize("name", ["block_size_frames", "max_num_blocks"])
def test_settings_of_a_pool_that_is_not_there_are_refused(name: str) -> None:
    spec = EncoderSpec(256, 4, 6, chunk_frames=16)
    config = ServingConfig.of(**{name: 20})
    with pytest.raises(ConfigError, match=f"{name}=20 sizes a pool of K/V blocks"):
        plan_kv(config, spec, device=CPU, dtype=torch.float32)
    assert plan_kv(ServingConfig(), spec, device=CPU, dtype=torch.float32) is None
