"""Server-wide settings: strings in, one checked object out, every refusal with its remedy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from oasr_backend.config import OVERRIDES_VARIABLE, ServingConfig, merged_parameters
from oasr_backend.errors import ConfigError


def test_strings_become_the_types_of_the_fields() -> None:
    config = ServingConfig.from_parameters({
        "chunk_size": " 8 ",
        "tail_padding": "No",
        "blank_threshold": "0.95",
        "checkpoint_dir": " /models/a ",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "yes",
    })  # fmt: skip
    assert (config.chunk_size, config.tail_padding, config.blank_threshold) == (8, False, 0.95)
    assert config.checkpoint_dir == "/models/a"
    assert config.num_left_chunks == ServingConfig().num_left_chunks


@pytest.mark.parametrize("field", fields(ServingConfig), ids=lambda field: field.name)
def test_every_default_survives_the_way_through_a_string(field: object) -> None:
    name = field.name  # type: ignore[attr-defined]
    default = getattr(ServingConfig(), name)
    config = ServingConfig.from_parameters({name: str(default)})
    assert getattr(config, name) == default
    assert type(getattr(config, name)) is type(default)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'num_left_chunk'; did you mean 'num_left_chunks'"):
        ServingConfig.from_parameters({"num_left_chunk": "4"})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("chunk_size", "sixteen", "is not an integer; write one such as 16"),
        ("chunk_size", "0", "below 1"),
        ("beam_size", "0", "below 1"),
        ("position_limit_frames", "0", "below 1"),
        ("num_left_chunks", "-2", "below -1"),
        ("max_streams", "-1", "below 0"),
        ("max_streams", "1e3", "is not an integer"),
        ("dtype", "float8", "choose float32 or bfloat16 or float16"),
        ("decoder", "beam", "choose greedy or prefix_beam"),
        ("log_level", "loud", "choose debug"),
        ("tail_padding", "maybe", "use true or false"),
        ("blank_threshold", "0", "outside (0, 1]"),
        ("blank_threshold", "1.5", "outside (0, 1]"),
        ("stream_idle_timeout_s", "0", "must be positive; give"),
        ("stream_idle_timeout_s", "soon", "is not a number; write one such as 90.0"),
        ("dead_after_s", "-1", "below 0; give 0 or more"),
        ("num_threads", "5000", "outside 0 .. 512; give a value in that range"),
        ("num_threads", "-1", "outside 0 .. 512"),
        ("rescoring_max_s", "1e9", "outside 1 .. 3600; give"),
        ("device", "tpu", "choose auto, cpu, cuda or cuda:N"),
        ("device", "cuda:", "choose auto, cpu, cuda or cuda:N"),
        ("device", "cuda:0 1", "choose auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(
    name: str, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServingConfig.from_parameters({name: text})
    assert name in str(caught.value)
    assert words in str(caught.value)


def names_of(kind: type) -> list[str]:
    return [f.name for f in fields(ServingConfig) if type(f.default) is kind]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", names_of(float))
def test_a_number_is_finite(name: str, text: str) -> None:
    """A limit that is not a number is never reached: no stream would be reaped."""
    with pytest.raises(ConfigError, match=rf"{name}={text} is no finite number; write one such as"):
        ServingConfig.from_parameters({name: text})
    with pytest.raises(ConfigError, match=rf"{name}={text} is no finite number; write one such as"):
        ServingConfig(**{name: float(text)})


@pytest.mark.parametrize("name", names_of(int))
def test_an_ill_typed_number_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='wide' is not an integer; write one such as"):
        ServingConfig.from_parameters({name: "wide"})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_every_name_of_a_device_is_taken(device: str) -> None:
    assert ServingConfig.from_parameters({"device": device}).device == device


def test_derived_defaults_depend_on_the_device_and_never_on_given_values() -> None:
    cpu = ServingConfig(chunk_size=8).with_defaults(on_gpu=False)
    gpu = ServingConfig(max_streams=7).with_defaults(on_gpu=True)
    assert (cpu.block_size_frames, cpu.max_streams, cpu.max_step_streams) == (8, 256, 64)
    assert (gpu.max_streams, gpu.max_step_streams) == (7, 1024)
    assert cpu.dead_after_s == cpu.stream_idle_timeout_s


def test_a_relative_checkpoint_starts_at_the_models_folder(tmp_path: Path) -> None:
    assert ServingConfig(checkpoint_dir="demo").resolve_checkpoint(tmp_path) == tmp_path / "demo"
    absolute = ServingConfig(checkpoint_dir="/models/a").resolve_checkpoint(tmp_path)
    assert absolute == Path("/models/a")
    home = ServingConfig(checkpoint_dir="~/a").resolve_checkpoint(tmp_path)
    assert home == Path.home() / "a"


def test_overrides_of_the_environment_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDES_VARIABLE, raising=False)
    assert merged_parameters({"device": "cpu"}) == {"device": "cpu"}
    monkeypatch.setenv(OVERRIDES_VARIABLE, '{"device": "cuda", "max_streams": 8}')
    assert merged_parameters({"device": "cpu", "dtype": "float32"}) == {
        "device": "cuda",
        "dtype": "float32",
        "max_streams": "8",
    }


@pytest.mark.parametrize("text", ["{", "[1]", '"a"'])
def test_overrides_that_are_no_object_are_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(OVERRIDES_VARIABLE, text)
    with pytest.raises(ConfigError, match=OVERRIDES_VARIABLE):
        merged_parameters({})
