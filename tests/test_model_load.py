"""From Triton's arguments to an engine: devices that are not there, limits that exclude others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from oasr_backend.config import ServingConfig
from oasr_backend.errors import ConfigError
from oasr_backend.triton_backend.load import check_gpu, device_of, load_engine, read_config
from oasr_backend.triton_backend.overrides import OVERRIDES_VARIABLE, write_overrides
from tests.conftest import GOLDEN_DIR

GOLDEN = GOLDEN_DIR / "wenet_small"


def arguments(
    *, kind: str = "CPU", idle_us: str = "60000000", candidates: int = 16, **parameters: str
) -> dict[str, str]:
    """What Triton hands to `initialize`."""
    parameters = {"checkpoint_dir": str(GOLDEN), "max_streams": "4", **parameters}
    config = {
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        "sequence_batching": {
            "max_sequence_idle_microseconds": idle_us,
            "oldest": {"max_candidate_sequences": candidates},
        },
    }
    return {
        "model_config": json.dumps(config),
        "model_name": "oasr_streaming",
        "model_repository": "/nowhere",
        "model_instance_name": "oasr_streaming_0_0",
        "model_instance_kind": kind,
        "model_instance_device_id": "3",
    }


BEAM = {"decoder": "prefix_beam"}


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


@pytest.fixture(name="unread", params=["missing", "garbage"])
def _unread(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose weights are a fault of their own, for the one who reads them."""
    directory = Path(shutil.copytree(GOLDEN, tmp_path / "checkpoint"))
    (directory / "final.pt").unlink()
    if request.param == "garbage":
        (directory / "final.pt").write_bytes(b"no weights" * 1000)
    return directory


def test_such_weights_are_a_fault_once_they_are_read(unread: Path) -> None:
    assert "final.pt" in refusal(arguments(checkpoint_dir=str(unread)))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"candidates": 4}, "max_candidate_sequences=4 in config.pbtxt must exceed max_streams=4"),
        ({"idle_us": "90000000"}, "max_sequence_idle_microseconds (90 s)"),
        ({"max_streams": "0"}, "must exceed max_streams=256"),
        ({"device": "cuda:99"}, "device='cuda:99'"),
        ({"num_threads": "5000"}, "num_threads=5000"),
        ({"beam_size": "65"}, "beam_size=65"),
        ({"lm_path": "none.arpa"}, "none.arpa cannot be read"),
        ({"lm_path": "train.yaml"}, "lm_path"),
        ({**BEAM, "use_lm": "true"}, "use_lm: this server has no n-gram model"),
        ({**BEAM, "hotwords": "\u4f60"}, "hotwords: the model's units cannot spell '\u4f60'"),
    ],
)
def test_what_needs_no_weights_is_told_before_they_are_read(
    unread: Path, changed: dict[str, Any], words: str
) -> None:
    assert words in refusal(arguments(checkpoint_dir=str(unread), **changed))


def test_a_model_takes_the_overrides_that_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {
        "chunk_size": "8", "oasr_streaming:max_streams": "5", "other:dtype": "float16",
        "load_delay_s": "1",
    }  # fmt: skip
    monkeypatch.setenv(OVERRIDES_VARIABLE, write_overrides(overrides))
    config = read_config(arguments())
    assert (config.cache.chunk_size, config.step.max_streams, config.model.dtype) == (
        8, 5, "float32",
    )  # fmt: skip
    monkeypatch.setenv(OVERRIDES_VARIABLE, '{"oasr_streaming:load_delay_s": "1"}')
    with pytest.raises(ConfigError, match="unknown parameter 'load_delay_s'"):
        read_config(arguments())
