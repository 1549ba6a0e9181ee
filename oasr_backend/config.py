"""Server-wide settings: the string parameters of config.pbtxt, checked once, at the edge.

The keys of config.pbtxt are flat; here each stands with those that concern the same part.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from oasr_backend.errors import ConfigError, InvalidRequestError, shown
from oasr_backend.options import StreamOptions

#: More threads than cores only wait for each other, and each one takes time to start.
MAX_THREADS = 512
DTYPES = ("float32", "bfloat16", "float16")
CPU_ENCODERS = ("auto", "onnx", "onnx_int8", "pytorch")
LOG_LEVELS = ("debug", "info", "warning", "error")
#: Triton keeps some keys of `parameters` for its Python backend.
TRITON_KEYS = frozenset(("FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"))


@dataclass(frozen=True)
class ModelSettings:
    """Which model is served, and what it runs on."""

    # A checkpoint's folder; relative paths start at the model's folder in the repository.
    checkpoint_dir: str = "demo_en"
    # auto: the instance's GPU when there is one, else the CPU; cpu, cuda or cuda:N: just that.
    device: str = "auto"
    dtype: str = "float32"
    # What the model speaks; a stream that asks for another language is refused.
    language: str = ""
    # CPU threads of PyTorch in one step, MAX_THREADS at most; 0: its choice, or 1 beside other
    # steps. The graph of an encoder (cpu_encoder) has one.
    num_threads: int = 0
    # What runs the encoder on a CPU. onnx: ONNX Runtime, by a graph that is made once and kept;
    # onnx_int8: the same with weights of 8 bits, faster, and some texts differ; pytorch; auto: onnx
    # where it can be had, and PyTorch until a graph is there.
    cpu_encoder: str = "auto"

    def __post_init__(self) -> None:
        _check_device(self.device)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("cpu_encoder", self.cpu_encoder, CPU_ENCODERS)
        _check_range("num_threads", self.num_threads, 0, MAX_THREADS)

    def resolve_checkpoint(self, model_dir: Path) -> Path:
        """`checkpoint_dir` as a path; a relative one starts at the model's folder."""
        return model_dir / Path(self.checkpoint_dir).expanduser()


@dataclass(frozen=True)
class CacheSettings:
    """What a stream hears at a time, and what is kept of what it has heard."""

    # What a step hears, in the words of the checkpoint's toolkit: encoder frames for WeNet, frames
    # of 20 ms for icefall. Give one that the checkpoint was trained with: another
    # is refused for a WeNet checkpoint of one fixed size, and warned of for an icefall one.
    chunk_size: int = 16
    # Past chunks that attention sees; 0: none, -1: all (a stream then has a finite length).
    num_left_chunks: int = 4
    # Encoder frames a block; 0: those of a step.
    block_size_frames: int = 0
    # Blocks of the pool; 0: exactly what max_streams can need.
    max_num_blocks: int = 0
    # MiB of K/V pool, and of declared states, that a CPU instance may take; a GPU instance measures
    # its free memory.
    cpu_kv_budget_mib: int = 4096
    # Block-table width of a stream with unlimited history.
    max_blocks_per_seq: int = 512
    # Absolute positions stay below this; the offset is re-based there.
    position_limit_frames: int = 5000

    def __post_init__(self) -> None:
        _check_minimum("num_left_chunks", self.num_left_chunks, -1)
        for name in ("block_size_frames", "max_num_blocks"):
            _check_minimum(name, getattr(self, name), 0)
        for name in (
            "chunk_size", "cpu_kv_budget_mib", "max_blocks_per_seq", "position_limit_frames",
        ):  # fmt: skip
            _check_minimum(name, getattr(self, name), 1)


@dataclass(frozen=True)
class StepSettings:
    """How many streams are held, and how they share a step."""

    # Streams held at once; 0: 256 on a CPU, 2048 on a GPU.
    max_streams: int = 0
    # Rows of one encoder step; 0: 16 on a CPU, whose caches hold no more, 1024 on a GPU.
    max_step_streams: int = 0
    # Steps that go on at the same time on a CPU, each of other streams; 0: one, and in a server
    # one for each core of the instance. A GPU has one.
    steps_at_once: int = 0
    # On a GPU: replay the whole step as one captured graph.
    cuda_graphs: bool = True
    # For tests of overload: every step takes this much longer.
    debug_slow_step_ms: int = 0

    def __post_init__(self) -> None:
        for name in ("max_streams", "max_step_streams", "debug_slow_step_ms"):
            _check_minimum(name, getattr(self, name), 0)
        _check_range("steps_at_once", self.steps_at_once, 0, MAX_THREADS)


@dataclass(frozen=True)
class DecodingSettings:
    """What all searches of a server share; what a stream may choose is in `defaults`."""

    # The prefix beam skips frames whose blank probability exceeds this; 1: none.
    blank_threshold: float = 1.0
    # What a transducer's searches take off the blank's logit, so that more is told; 0: nothing.
    blank_penalty: float = 0.0
    # An n-gram model over units in ARPA format, relative to the checkpoint; empty: none.
    lm_path: str = ""
    # Weight of its log-probs in the prefix beam, and what each unit gains against their cost.
    lm_weight: float = 0.3
    lm_unit_bonus: float = 0.5
    # Rescoring: weight of a hypothesis's score in the beam beside the attention decoder's.
    rescoring_ctc_weight: float = 0.5
    # Rescoring: seconds of encoder output that are kept; a longer stream keeps the beam's order.
    rescoring_max_s: float = 60.0

    def __post_init__(self) -> None:
        _check_finite(self)
        if not 0.0 < self.blank_threshold <= 1.0:
            raise ConfigError(
                f"blank_threshold={self.blank_threshold} is outside (0, 1]; 1 skips no frame"
            )
        _check_range("blank_penalty", self.blank_penalty, 0.0, 100.0)
        _check_range("rescoring_ctc_weight", self.rescoring_ctc_weight, 0.0, 100.0)
        _check_range("rescoring_max_s", self.rescoring_max_s, 1.0, 3600.0)


@dataclass(frozen=True)
class ServiceSettings:
    """How a server treats its streams, and what it logs of them."""

    # Silence after END, so that the last real frames pass through full windows.
    tail_padding: bool = True
    # Seconds without a request after which a stream is freed; must exceed Triton's own limit.
    stream_idle_timeout_s: float = 90.0
    # Seconds of silence after which Triton itself has forgotten a sequence; 0: as
    # stream_idle_timeout_s. The Triton model takes it from config.pbtxt.
    dead_after_s: float = 0.0
    # info: a line for each stream that opens or ends; warning: faults only.
    log_level: str = "info"

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        _check_minimum("dead_after_s", self.dead_after_s, 0)
        if self.stream_idle_timeout_s <= 0:
            raise ConfigError(
                f"stream_idle_timeout_s={self.stream_idle_timeout_s:g} must be positive; give "
                "seconds beyond Triton's own limit"
            )


@dataclass(frozen=True)
class ServingConfig:
    """All settings of one model. `of`, `changed` and `from_parameters` take the flat keys.

    0 or -1 stands for something else only where the comment of a setting says so.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    step: StepSettings = field(default_factory=StepSettings)
    search: DecodingSettings = field(default_factory=DecodingSettings)
    server: ServiceSettings = field(default_factory=ServiceSettings)
    # What a stream gets that asks for nothing.
    defaults: StreamOptions = field(default_factory=StreamOptions)

    @classmethod
    def of(cls, **flat: Any) -> ServingConfig:
        """From typed values by their flat keys. Raises ConfigError naming the key at fault."""
        return cls().changed(**flat)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> ServingConfig:
        """From name -> string. Raises ConfigError for an unknown name or an ill-typed value."""
        given = {name: text for name, text in parameters.items() if name not in TRITON_KEYS}
        return cls.of(**{name: _parse(name, text) for name, text in given.items()})

    def changed(self, **flat: Any) -> ServingConfig:
        """A copy in which the settings of these flat keys have other values.

        Raises ConfigError for an unknown key or a value that cannot be honoured.
        """
        by_group: dict[str, dict[str, Any]] = {}
        for name, value in flat.items():
            _check_type(name, value)
            by_group.setdefault(_key(name).group, {})[name] = value
        try:
            groups = {
                group: replace(getattr(self, group), **values) for group, values in by_group.items()
            }
        except InvalidRequestError as error:
            raise ConfigError(f"the defaults of the server's streams: {error}") from error
        return replace(self, **groups)

    def with_defaults(self, *, on_gpu: bool) -> ServingConfig:
        """Every 0 that stands for a derived default replaced by its value."""
        step, server = self.step, self.server
        return self.changed(
            max_streams=step.max_streams or (2048 if on_gpu else 256),
            max_step_streams=step.max_step_streams or (1024 if on_gpu else 16),
            steps_at_once=1 if on_gpu else step.steps_at_once or 1,
            dead_after_s=server.dead_after_s or server.stream_idle_timeout_s,
        )


class Key(NamedTuple):
    """One flat key: the group that holds it, the name of its type, and its default."""

    group: str
    kind: str
    default: Any


def unknown_key(name: str, known: Mapping[str, object]) -> str:
    """What is told of a key that is none of the known ones."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown parameter {name!r}; did you mean {nearest[0]!r}? Known: {', '.join(known)}"


def _key(name: str) -> Key:
    if name not in KEYS:
        raise ConfigError(unknown_key(name, KEYS))
    return KEYS[name]


def _check_type(name: str, value: object) -> None:
    """A whole number does for a fraction; a boolean is no number, although Python counts it so."""
    kind = _key(name).kind
    is_bool = isinstance(value, bool)
    if is_bool != (kind == "bool") or not isinstance(value, _TYPES[kind]):
        raise ConfigError(
            f"{name}={shown(value)} is of type {type(value).__name__}; give it as {kind}"
        )


def _parse(name: str, text: str) -> Any:
    return _PARSERS[_key(name).kind](name, text)


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
            raise ConfigError(
                f"{name}={text!r} is not {noun}; write one such as {KEYS[name].default}"
            ) from None

    return parse


#: What Python may hold of each kind.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}
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


def _check_finite(settings: DecodingSettings | ServiceSettings) -> None:
    for one in fields(settings):
        value = getattr(settings, one.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{one.name}={value} is no finite number; write one such as {one.default}"
            )


def _check_device(value: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value, re.ASCII):
        raise ConfigError(
            f"device={value!r} is unknown; choose auto, cpu, cuda or cuda:N, the number of a GPU"
        )


def _keys() -> dict[str, Key]:
    keys, config = {}, ServingConfig()
    for group in fields(config):
        for one in fields(getattr(config, group.name)):
            # A model's language is no wish of a stream, and no server makes stereo its default.
            if group.name != "defaults" or one.name not in ("language", "channels"):
                keys[one.name] = Key(group.name, str(one.type), one.default)
    return keys


#: Every key of config.pbtxt that this backend knows.
KEYS: Mapping[str, Key] = _keys()
