"""From Triton's arguments to an engine: devices that are not there, limits that exclude others."""

from __future__ import annotations

import json

import pytest
import torch

from oasr_backend.config import ServingConfig
from oasr_backend.errors import ConfigError
from oasr_backend.triton_backend.load import check_gpu, device_of, load_engine, read_config
from tests.conftest import GOLDEN_DIR

GOLDEN = GOLDEN_DIR / "wenet_small"


def arguments(*, kind: str = "CPU", idle_us: str = "60000000", **parameters: str) -> dict[str, str]:
    """What Triton hands to `initialize`."""
    parameters = {"checkpoint_dir": str(GOLDEN), "max_streams": "4", **parameters}
    config = {
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        "sequence_batching": {
            "max_sequence_idle_microseconds": idle_us,
            "oldest": {"max_candidate_sequences": 16},
        },
    }
    return {
        "model_config": json.dumps(config),
        "model_repository": "/nowhere",
        "model_instance_name": "oasr_streaming_0_0",
        "model_instance_kind": kind,
        "model_instance_device_id": "3",
    }


def refusal(args: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_engine(args, read_config(args))
    return str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_a_device_that_is_there_is_taken(device: str) -> None:
    check_gpu(device, device, num_gpus=2)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_without_a_gpu_the_setting_is_named_with_both_remedies(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_gpu(device, device, num_gpus=0)
    text = str(caught.value)
    assert text.startswith(f"device='{device}' needs a GPU, and PyTorch {torch.__version__} finds")
    assert "set device=cpu, or install a PyTorch with CUDA" in text


def test_a_gpu_beyond_the_last_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda:3' is none of .*: cuda:0, cuda:1; set"):
        check_gpu("cuda:3", "cuda:3", num_gpus=2)


def test_a_gpu_that_triton_chose_is_laid_at_its_door() -> None:
    args = arguments(kind="GPU")
    device = device_of(ServingConfig().model.device, args, num_gpus=1)
    with pytest.raises(ConfigError, match=r"device='auto' is cuda:3 by .*instance_group, .* none"):
        check_gpu(device, "auto", num_gpus=1)


def test_instances_without_a_gpu_of_their_own_take_turns() -> None:
    args = [arguments() | {"model_instance_name": f"oasr_streaming_0_{i}"} for i in range(5)]
    assert [device_of("auto", one, num_gpus=2)[-1] for one in args] == ["0", "1", "0", "1", "0"]
    assert {device_of("auto", one, num_gpus=1) for one in args} == {"cuda:0"}
    assert {device_of("auto", one, num_gpus=0) for one in args} == {"cpu"}
    assert {device_of("cuda:1", one, num_gpus=2) for one in args} == {"cuda:1"}
    assert {device_of("auto", arguments(kind="GPU"), num_gpus=4)} == {"cuda:3"}
    nameless = arguments() | {"model_instance_name": "main"}
    assert device_of("auto", nameless, num_gpus=2) == "cuda:0"


def test_a_model_is_not_loaded_for_a_gpu_that_is_missing() -> None:
    assert "device='cuda:99'" in refusal(arguments(device="cuda:99"))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"dead_after_s": "500"}, ["exceed dead_after_s=500:", "dead_after_s=0 for the 60 s of"]),
        (
            {"stream_idle_timeout_s": "60"},
            ["max_sequence_idle_microseconds (60 s)", "config.pbtxt"],
        ),
    ],
)
def test_the_idle_limit_that_excludes_the_other_is_named_where_it_was_set(
    parameters: dict[str, str], words: list[str]
) -> None:
    text = refusal(arguments(**parameters))
    assert text.startswith("stream_idle_timeout_s=")
    assert "raise the first" in text
    for word in words:
        assert word in text


def test_limits_in_the_right_order_are_taken() -> None:
    args = arguments(dead_after_s="80")
    assert load_engine(args, read_config(args)).config.server.dead_after_s == 80
