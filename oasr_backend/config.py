"""Server-wide settings: the string parameters of config.pbtxt, checked once, at the edge."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from oasr_backend.errors import ConfigError

#: JSON object of parameters that win over config.pbtxt; `oasr-serve --set` writes it.
OVERRIDES_VARIABLE = "OASR_BACKEND_OVERRIDES"
#: More threads than cores only wait for each other, and each one takes time to start.
MAX_THREADS = 512
DTYPES = ("float32", "bfloat16", "float16")
#: Triton keeps some keys of `parameters` for its Python backend.
_TRITON_KEYS = {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}


@dataclass(frozen=True)
class ServingConfig:
    """One field a parameter. Comments say what a value means; 0 or -1 only where a comment does."""

    # A WeNet directory; relative paths start at the model's folder in the repository.
    checkpoint_dir: str = "demo_en"
    # auto: the instance's GPU when there is one, else the CPU; cpu, cuda or cuda:N: just that.
    device: str = "auto"
    dtype: str = "float32"
    # Encoder frames a step; must be one that the checkpoint was trained with.
    chunk_size: int = 16
    # Past chunks that attention sees; 0: none, -1: all (a stream then has a finite length).
    num_left_chunks: int = 4
    # Encoder frames a block; 0: the chunk size.
    block_size_frames: int = 0
    # Streams held at once; 0: 256 on a CPU, 2048 on a GPU.
    max_streams: int = 0
    # Rows of one encoder step; 0: 64 on a CPU, 1024 on a GPU.
    max_step_streams: int = 0
    # On a GPU: replay the whole step as one captured graph.
    cuda_graphs: bool = True
    # Blocks of the pool; 0: exactly what max_streams can need.
    max_num_blocks: int = 0
    # MiB of K/V pool that a CPU instance may take; a GPU instance measures its free memory.
    cpu_kv_budget_mib: int = 4096
    # Block-table width of a stream with unlimited history.
    max_blocks_per_seq: int = 512
    # Absolute positions stay below this; the offset is re-based there.
    position_limit_frames: int = 5000
    # Silence after END, so that the last real frames pass through full windows.
    tail_padding: bool = True
    # Defaults for what a stream may ask for at START (stream_options.py says what each one means).
    sample_rate: int = 16000
    encoding: str = "pcm"
    decoder: str = "greedy"
    beam_size: int = 10
    nbest: int = 1
    word_times: bool = False
    partials: str = "every"
    hotwords: str = ""
    hotword_boost: float = 1.0
    endpoint: bool = False
    endpoint_silence_s: float = 0.8
    endpoint_silence_start_s: float = 5.0
    endpoint_max_s: float = 30.0
    use_lm: bool = False
    rescoring: bool = False
    # An n-gram model over units in ARPA format, relative to the checkpoint; empty: none.
    lm_path: str = ""
    # Weight of its log-probs in the prefix beam, and what each unit gains against their cost.
    lm_weight: float = 0.3
    lm_unit_bonus: float = 0.5
    # Rescoring: weight of a hypothesis's score in the beam beside the attention decoder's.
    rescoring_ctc_weight: float = 0.5
    # Rescoring: seconds of encoder output that are kept; a longer stream keeps the beam's order.
    rescoring_max_s: float = 60.0
    # What the model speaks; a stream that asks for another language is refused.
    language: str = ""
    # Frames whose blank probability exceeds this are skipped; 1: none.
    blank_threshold: float = 1.0
    # Seconds without a request after which a stream is freed; must exceed Triton's own limit.
    stream_idle_timeout_s: float = 90.0
    # Seconds of silence after which Triton itself has forgotten a sequence; 0: as
    # stream_idle_timeout_s. The Triton model takes it from config.pbtxt.
    dead_after_s: float = 0.0
    # CPU threads of one instance, MAX_THREADS at most; 0: PyTorch's choice.
    num_threads: int = 0
    # info: a line for each stream that opens or ends; warning: faults only.
    log_level: str = "info"
    # For tests of overload: every step takes this much longer.
    debug_slow_step_ms: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "float":
                _check_finite(field.name, getattr(self, field.name))
        _check_device(self.device)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _check_choice("decoder", self.decoder, ("greedy", "prefix_beam"))
        _check_minimum("num_left_chunks", self.num_left_chunks, -1)
        for name in (
            "chunk_size", "beam_size", "cpu_kv_budget_mib", "max_blocks_per_seq",
            "position_limit_frames",
        ):  # fmt: skip
            _check_minimum(name, getattr(self, name), 1)
        for name in (
            "block_size_frames", "max_streams", "max_step_streams", "max_num_blocks",
            "debug_slow_step_ms",
        ):  # fmt: skip
            _check_minimum(name, getattr(self, name), 0)
        _check_range("num_threads", self.num_threads, 0, MAX_THREADS)
        if not 0.0 < self.blank_threshold <= 1.0:
            raise ConfigError(
                f"blank_threshold={self.blank_threshold} is outside (0, 1]; 1 skips no frame"
            )
        _check_range("rescoring_ctc_weight", self.rescoring_ctc_weight, 0.0, 100.0)
        _check_range("rescoring_max_s", self.rescoring_max_s, 1.0, 3600.0)
        _check_minimum("dead_after_s", self.dead_after_s, 0)
        if self.stream_idle_timeout_s <= 0:
            raise ConfigError(
                f"stream_idle_timeout_s={self.stream_idle_timeout_s:g} must be positive; give "
                "seconds beyond Triton's own limit"
            )

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> ServingConfig:
        """From name -> string. Raises ConfigError for an unknown name or an ill-typed value."""
        kinds = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in parameters.items():
            if name in _TRITON_KEYS:
                continue
            if name not in kinds:
                raise ConfigError(_unknown(name, kinds))
            values[name] = _PARSERS[kinds[name]](name, text)
        return cls(**values)

    def with_defaults(self, *, on_gpu: bool) -> ServingConfig:
        """Every 0 that stands for a derived default replaced by its value."""
        return replace(
            self,
            block_size_frames=self.block_size_frames or self.chunk_size,
            max_streams=self.max_streams or (2048 if on_gpu else 256),
            dead_after_s=self.dead_after_s or self.stream_idle_timeout_s,
            max_step_streams=self.max_step_streams or (1024 if on_gpu else 64),
        )

    def resolve_checkpoint(self, model_dir: Path) -> Path:
        """`checkpoint_dir` as a path; a relative one starts at the model's folder."""
        return model_dir / Path(self.checkpoint_dir).expanduser()


def merged_parameters(parameters: Mapping[str, str]) -> dict[str, str]:
    """config.pbtxt's parameters with the overrides of the environment on top."""
    text = os.environ.get(OVERRIDES_VARIABLE, "{}")
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{OVERRIDES_VARIABLE}={text!r} is not JSON ({error}); unset it or use oasr-serve --set"
        ) from error
    if not isinstance(overrides, dict):
        raise ConfigError(
            f"{OVERRIDES_VARIABLE}={text!r} is no JSON object; unset it or use oasr-serve --set"
        )
    return {**parameters, **{str(name): str(value) for name, value in overrides.items()}}


def _unknown(name: str, known: Mapping[str, str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown parameter {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(known)}"


def _parse_bool(name: str, text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return values[text.strip().lower()]
    except KeyError:
        raise ConfigError(f"{name}={text!r} is not a boolean; use true or false") from None


def _parse_number(kind: Callable[[str], Any], noun: str) -> Callable[[str, str], Any]:
    def parse(name: str, text: str) -> Any:
        try:
            return kind(text.strip())
        except ValueError:
            default = getattr(ServingConfig, name)
            raise ConfigError(
                f"{name}={text!r} is not {noun}; write one such as {default}"
            ) from None

    return parse


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "str": lambda _, text: text.strip(),
    "int": _parse_number(int, "an integer"),
    "float": _parse_number(float, "a number"),
    "bool": _parse_bool,
}


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; choose {' or '.join(choices)}")


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(
            f"{name}={value:g} is outside {least:g} .. {most:g}; give a value in that range"
        )


def _check_minimum(name: str, value: float, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(f"{name}={value} is below {minimum}; give {minimum} or more")


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        default = getattr(ServingConfig, name)
        raise ConfigError(f"{name}={value} is no finite number; write one such as {default}")


def _check_device(value: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value, re.ASCII):
        raise ConfigError(
            f"device={value!r} is unknown; choose auto, cpu, cuda or cuda:N, the number of a GPU"
        )
