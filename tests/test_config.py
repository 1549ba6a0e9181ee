"""Server-wide settings: strings in, one checked object out, every refusal with its remedy."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from oasr_backend.config import KEYS, ServingConfig
from oasr_backend.errors import ConfigError
from oasr_backend.options import StreamOptions


def test_strings_become_the_types_of_the_fields() -> None:
    config = ServingConfig.from_parameters({
        "chunk_size": " 8 ",
        "tail_padding": "No",
        "blank_threshold": "0.95",
        "checkpoint_dir": " /models/a ",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "yes",
    })  # fmt: skip
    assert (config.cache.chunk_size, config.server.tail_padding) == (8, False)
    assert config.search.blank_threshold == 0.95
    assert config.model.checkpoint_dir == "/models/a"
    assert config.cache.num_left_chunks == ServingConfig().cache.num_left_chunks


def setting(config: ServingConfig, name: str) -> object:
    return getattr(getattr(config, KEYS[name].group), name)


@pytest.mark.parametrize("name", KEYS)
def test_every_default_survives_the_way_through_a_string(name: str) -> None:
    default = KEYS[name].default
    config = ServingConfig.from_parameters({name: str(default)})
    assert config == ServingConfig()
    assert setting(config, name) == default
    assert type(setting(config, name)) is type(default)


def test_each_key_stands_in_one_group() -> None:
    groups = [getattr(ServingConfig(), group.name) for group in fields(ServingConfig)]
    named = Counter(one.name for group in groups for one in fields(group))
    # A stream may name the language that it expects; the server's key says what the model speaks.
    assert {name for name, count in named.items() if count > 1} == {"language"}
    assert set(named) == set(KEYS) | {"channels"}
    assert KEYS["language"].group == "model"


NAMES = (
    "checkpoint_dir", "device", "dtype", "language", "num_threads", "cpu_encoder",
    "chunk_size", "num_left_chunks", "block_size_frames", "max_num_blocks", "cpu_kv_budget_mib",
    "max_blocks_per_seq", "position_limit_frames",
    "max_streams", "max_step_streams", "steps_at_once", "cuda_graphs", "debug_slow_step_ms",
    "blank_threshold", "blank_penalty", "lm_path", "lm_weight", "lm_unit_bonus",
    "rescoring_ctc_weight", "rescoring_max_s",
    "tail_padding", "stream_idle_timeout_s", "dead_after_s", "log_level",
    "sample_rate", "encoding", "decoder", "beam_size", "nbest", "word_times", "partials",
    "hotwords", "hotword_boost", "endpoint", "endpoint_silence_s", "endpoint_silence_start_s",
    "endpoint_max_s", "use_lm", "rescoring",
)  # fmt: skip


def test_the_keys_are_these() -> None:
    """Files in the field hold them: a name that goes away breaks a server."""
    assert set(KEYS) == set(NAMES)


def test_settings_change_by_their_flat_keys_and_the_rest_stays() -> None:
    config = ServingConfig.of(max_streams=7, nbest=1)
    changed = config.changed(chunk_size=8, beam_size=4)
    assert (changed.step.max_streams, changed.cache.chunk_size) == (7, 8)
    assert changed.defaults == StreamOptions(beam_size=4)
    assert config.cache.chunk_size == 16
    with pytest.raises(ConfigError, match="'chunk_sise'; did you mean 'chunk_size'"):
        config.changed(chunk_sise=8)
    with pytest.raises(ConfigError, match=r"defaults of the server's streams: beam_size=65 is out"):
        config.changed(beam_size=65)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'num_left_chunk'; did you mean 'num_left_chunks'"):
        ServingConfig.from_parameters({"num_left_chunk": "4"})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("chunk_size", "sixteen", "is not an integer; write one such as 16"),
        ("chunk_size", "0", "below 1"),
        ("beam_size", "-1", "outside 0 .. 64"),
        ("blank_penalty", "-0.5", "outside 0 .. 100; give a value in that range"),
        ("blank_penalty", "nan", "is no finite number"),
        ("position_limit_frames", "0", "below 1"),
        ("num_left_chunks", "-2", "below -1"),
        ("max_streams", "-1", "below 0"),
        ("max_streams", "1e3", "is not an integer"),
        ("dtype", "float8", "choose float32 or bfloat16 or float16"),
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


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("chunk_size", "8", "str"),
        ("chunk_size", 8.5, "float"),
        ("max_streams", True, "bool"),
        ("lm_weight", "0.3", "str"),
        ("lm_weight", False, "bool"),
        ("tail_padding", 1, "int"),
        ("dtype", 32, "int"),
        ("beam_size", None, "NoneType"),
        ("checkpoint_dir", Path("demo"), "PosixPath"),
    ],
)
def test_an_ill_typed_value_is_refused_with_its_type(name: str, value: object, kind: str) -> None:
    for refuse in (ServingConfig.of, ServingConfig().changed):
        with pytest.raises(ConfigError) as caught:
            refuse(**{name: value})
        assert str(caught.value).startswith(f"{name}={value!r} is of type {kind}; give it as ")


def test_a_whole_number_does_for_a_fraction() -> None:
    assert ServingConfig.of(lm_weight=1).search.lm_weight == 1


def names_of(kind: type) -> list[str]:
    return [name for name, key in KEYS.items() if type(key.default) is kind]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", names_of(float))
def test_a_number_is_finite(name: str, text: str) -> None:
    """A limit that is not a number is never reached: no stream would be reaped."""
    refusal = rf"{name}={text} is (no finite number; write one such as|outside .*)"
    with pytest.raises(ConfigError, match=refusal):
        ServingConfig.from_parameters({name: text})
    with pytest.raises(ConfigError, match=refusal):
        ServingConfig.of(**{name: float(text)})


@pytest.mark.parametrize("name", names_of(int))
def test_an_ill_typed_number_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='wide' is not an integer; write one such as"):
        ServingConfig.from_parameters({name: "wide"})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_every_name_of_a_device_is_taken(device: str) -> None:
    assert ServingConfig.from_parameters({"device": device}).model.device == device


def test_derived_defaults_depend_on_the_device_and_never_on_given_values() -> None:
    cpu = ServingConfig.of(chunk_size=8).with_defaults(on_gpu=False)
    gpu = ServingConfig.of(max_streams=7).with_defaults(on_gpu=True)
    assert (cpu.step.max_streams, cpu.step.max_step_streams) == (256, 16)
    assert (gpu.step.max_streams, gpu.step.max_step_streams) == (7, 1024)
    assert (cpu.step.steps_at_once, gpu.step.steps_at_once) == (1, 1)
    assert ServingConfig.of(steps_at_once=4).with_defaults(on_gpu=False).step.steps_at_once == 4
    assert ServingConfig.of(steps_at_once=4).with_defaults(on_gpu=True).step.steps_at_once == 1
    assert cpu.server.dead_after_s == cpu.server.stream_idle_timeout_s


def test_a_relative_checkpoint_starts_at_the_models_folder(tmp_path: Path) -> None:
    assert (
        ServingConfig.of(checkpoint_dir="demo").model.resolve_checkpoint(tmp_path)
        == tmp_path / "demo"
    )
    absolute = ServingConfig.of(checkpoint_dir="/models/a").model.resolve_checkpoint(tmp_path)
    assert absolute == Path("/models/a")
    home = ServingConfig.of(checkpoint_dir="~/a").model.resolve_checkpoint(tmp_path)
    assert home == Path.home() / "a"
