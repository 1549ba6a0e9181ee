"""From what Triton tells a model instance to an engine that is ready to serve.

    python -m oasr_backend.triton_backend.load ARGUMENTS

loads once and ends, with the cause on one line of stderr if it cannot: `oasr-serve --check-only`.
Lines before it are warnings of the load, each behind `warning: `.
ARGUMENTS are those of Triton's `initialize`, as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from oasr_backend.config import KEYS, ServingConfig
from oasr_backend.cores import usable_cores
from oasr_backend.errors import ConfigError, OasrError
from oasr_backend.streaming import assemble
from oasr_backend.streaming.engine import Engine
from oasr_backend.triton_backend.overrides import overrides_of, read_overrides

#: Of one process: what Python does of a step keeps the steps of more cores waiting.
MOST_STEPS = 8
#: How a line of stderr begins that warns of a load.
WARNING = "warning: "


def read_config(args: Mapping[str, str]) -> ServingConfig:
    """The settings of config.pbtxt and the environment. Raises ConfigError."""
    model_config = json.loads(args["model_config"])
    parameters = {
        name: value["string_value"] for name, value in model_config.get("parameters", {}).items()
    }
    overrides = overrides_of(args["model_name"], read_overrides(), KEYS)
    config = ServingConfig.from_parameters({**parameters, **overrides})
    idle_s = _sequence_idle_s(model_config)
    return config if config.server.dead_after_s else config.changed(dead_after_s=idle_s)


def load_engine(
    args: Mapping[str, str],
    config: ServingConfig,
    *,
    on_stage: Callable[[str], None] = lambda _: None,
    may_export: bool = True,
) -> Engine:
    """Raises ConfigError, CheckpointError among them; what needs no weights is told first.

    Further as `assemble.load_engine`.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device_of(config.model.device, args, num_gpus=num_gpus)
    on_gpu = device.startswith("cuda")
    _check_sequence_batching(json.loads(args["model_config"]), config.with_defaults(on_gpu=on_gpu))
    check_gpu(device, config.model.device, num_gpus=num_gpus)
    if not on_gpu:
        config = with_cores(config, usable_cores(), num_instances=_num_instances(args))
    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
    checkpoint_dir = config.model.resolve_checkpoint(Path(args["model_repository"]))
    return assemble.load_engine(
        checkpoint_dir, config, device=device, on_stage=on_stage, may_export=may_export
    )


def with_cores(config: ServingConfig, num_cores: int, *, num_instances: int) -> ServingConfig:
    """Settings for an instance on a CPU: a step for each of its cores, a thread for each step.

    What the settings say already stays.
    """
    own_cores = max(1, num_cores // num_instances)
    steps = config.step.steps_at_once or min(own_cores, MOST_STEPS)
    threads = config.model.num_threads or max(1, own_cores // steps)
    return config.changed(steps_at_once=steps, num_threads=threads)


def _num_instances(args: Mapping[str, str]) -> int:
    """Instances of this model that share the cores."""
    groups = json.loads(args["model_config"]).get("instance_group", [])
    return max(1, sum(int(group.get("count", 1)) for group in groups))


def device_of(choice: str, args: Mapping[str, str], *, num_gpus: int) -> str:
    """The instance's own GPU where it has one, unless the configuration names a device.

    A tritonserver that was built without CUDA gives no GPU to any: then they take turns.
    """
    if choice != "auto":
        return choice
    if args["model_instance_kind"] == "GPU":
        return f"cuda:{args['model_instance_device_id']}"
    if not num_gpus:
        return "cpu"
    # Triton ends an instance's name with its number.
    number = args["model_instance_name"].rpartition("_")[2]
    return f"cuda:{int(number) % num_gpus if number.isdecimal() else 0}"


def check_gpu(device: str, choice: str, *, num_gpus: int) -> None:
    """Raises ConfigError for a GPU that PyTorch does not find.

    `choice` is the setting that `device` was made from, which may leave it to Triton.
    """
    if not device.startswith("cuda") or int(device.partition(":")[2] or 0) < num_gpus:
        return
    wanted = f"device={choice!r}"
    if choice == "auto":
        wanted = f"device='auto' is {device} by config.pbtxt's instance_group, which"
    if not num_gpus:
        raise ConfigError(
            f"{wanted} needs a GPU, and PyTorch {torch.__version__} finds none; set device=cpu, or "
            "install a PyTorch with CUDA and the driver for it"
        )
    found = ", ".join(f"cuda:{index}" for index in range(num_gpus))
    raise ConfigError(
        f"{wanted} is none of the GPUs that PyTorch finds: {found}; set device to one of them, or "
        "make more visible with CUDA_VISIBLE_DEVICES"
    )


def _sequence_idle_s(model_config: Mapping[str, Any]) -> float:
    """Triton's own limit on a silent sequence; where config.pbtxt has none it is a second."""
    batching = model_config.get("sequence_batching", {})
    return int(batching.get("max_sequence_idle_microseconds", 0)) / 1e6 or 1.0


def _check_sequence_batching(model_config: Mapping[str, Any], config: ServingConfig) -> None:
    """Refuses limits of config.pbtxt under which streams would be lost or wait in silence."""
    batching = model_config.get("sequence_batching")
    if not batching or "oldest" not in batching:
        raise ConfigError(
            "config.pbtxt needs sequence_batching { oldest { ... } }: the backend expects one "
            "request of a sequence at a time"
        )
    _check_idle_limits(config, _sequence_idle_s(model_config))
    candidates = int(batching["oldest"].get("max_candidate_sequences", 0))
    if candidates <= config.step.max_streams:
        raise ConfigError(
            f"max_candidate_sequences={candidates} in config.pbtxt must exceed max_streams="
            f"{config.step.max_streams}: beyond it Triton lets a START wait in silence"
        )


def _check_idle_limits(config: ServingConfig, sequence_idle_s: float) -> None:
    if config.server.stream_idle_timeout_s > config.server.dead_after_s:
        return
    below = f"stream_idle_timeout_s={config.server.stream_idle_timeout_s:g} must exceed"
    if config.server.dead_after_s == sequence_idle_s:
        raise ConfigError(
            f"{below} Triton's max_sequence_idle_microseconds ({sequence_idle_s:g} s): raise the "
            "first or lower the second in config.pbtxt"
        )
    raise ConfigError(
        f"{below} dead_after_s={config.server.dead_after_s:g}: raise the first, or set "
        f"dead_after_s=0 for the {sequence_idle_s:g} s of max_sequence_idle_microseconds in "
        "config.pbtxt"
    )


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return WARNING + " ".join(record.getMessage().split())


def _show_warnings() -> None:
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_OneLine())
    logging.getLogger("oasr_backend").addHandler(handler)


def main() -> None:
    args = json.loads(sys.argv[1])
    _show_warnings()
    try:
        load_engine(args, read_config(args))
    except OasrError as error:
        sys.exit(" ".join(str(error).split()))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
