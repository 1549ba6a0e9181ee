"""Loads each model once, as the server would, so that a failed load is told in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oasr_backend.config import ServingConfig
from oasr_backend.serve.checks import Problem
from oasr_backend.serve.command import LOAD_TIMEOUT_S, ServerSettings, build_environment
from oasr_backend.serve.embedded import TritonInstall
from oasr_backend.serve.overrides import CHECKPOINT_KEY, parameters_of
from oasr_backend.serve.repository import ModelConfig, read_models
from oasr_backend.triton_backend.overrides import merge_overrides, read_overrides

#: As in `triton_backend.load`, whose import would take the time that PyTorch's takes.
_WARNING = "warning: "


@dataclass
class Loads:
    """What the loads of all models said; `warnings` name their models."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def try_loads(install: TritonInstall, settings: ServerSettings) -> Loads:
    """Takes the memory and time of a start. Models of other backends are left out."""
    environment = build_environment(install, settings)
    configs = read_models(settings.model_repository, settings.instances)
    ours = [config for config in configs if config.is_ours]
    loads = Loads()
    for config in ours:
        _try_load(config, environment, loads)
    return loads


def loaded_models(settings: ServerSettings) -> list[str]:
    """The models that `try_loads` loads, each with the path of its checkpoint."""
    overrides = merge_overrides(read_overrides(), settings.overrides)
    configs = read_models(settings.model_repository, settings.instances)
    return [
        f"{config.name} with {_checkpoint_of(config, overrides)}"
        for config in configs
        if config.is_ours
    ]


def _checkpoint_of(config: ModelConfig, overrides: Mapping[str, str]) -> Path:
    parameters = parameters_of(config, overrides)
    given = {name: text for name, text in parameters.items() if name == CHECKPOINT_KEY}
    return ServingConfig.from_parameters(given).model.resolve_checkpoint(config.directory)


def _try_load(config: ModelConfig, environment: Mapping[str, str], loads: Loads) -> None:
    # The load has a process of its own, as in the server: its packages, variables and memory.
    command = [
        sys.executable,
        "-m",
        "oasr_backend.triton_backend.load",
        json.dumps(config.triton_arguments),
    ]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"the model {config.name} was not loaded after {LOAD_TIMEOUT_S} s"
        remedy = "give a smaller checkpoint or a faster device"
        loads.problems.append(Problem("load", message, remedy))
        return
    lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    if done.returncode != 0:
        message = f"the model {config.name} cannot be loaded: {lines[-1]}"
        loads.problems.append(Problem("load", message))
    told = [line.removeprefix(_WARNING) for line in lines if line.startswith(_WARNING)]
    loads.warnings += [f"{config.name}: {text}" for text in dict.fromkeys(told)]
