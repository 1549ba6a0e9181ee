"""How many instances of a model share the machine: what --instances says, else what its cores ask.

An instance is one process. On a CPU it runs a step on each of its cores, up to eight at once; past
that Python's lock keeps steps waiting, and more cores take more instances.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from oasr_backend.cores import usable_cores
from oasr_backend.errors import ConfigError
from oasr_backend.serve.command import ServerSettings
from oasr_backend.serve.cores import count_gpus
from oasr_backend.serve.overrides import DEVICE_KEY, nearest, parameters_of
from oasr_backend.serve.repository import ModelConfig, read_models
from oasr_backend.triton_backend.overrides import merge_overrides, read_overrides

#: Steps that one process runs at once: MOST_STEPS of `triton_backend/load.py`.
CORES_AN_INSTANCE = 8
# Under this flag config.pbtxt is read again while the server runs.
_CONTROL_FLAG = "--model-control-mode"
_ITEM = re.compile(r"(?:(?P<model>.*):)?\s*(?P<count>-?[0-9]{1,9})\s*")


def choose_instances(items: Sequence[str], settings: ServerSettings) -> dict[str, int]:
    """The number by model, for those of our models whose config.pbtxt has another one.

    items: those of --instances. Raises ConfigError for one that cannot be done.
    """
    configs = read_models(settings.model_repository)
    if not configs:
        return {}
    is_controlled = any(flag.startswith(_CONTROL_FLAG) for flag in settings.extra_flags)
    if items and is_controlled:
        raise ConfigError(
            f"--instances {items[0]!r} counts for config.pbtxt as it is at the start, and "
            f"{_CONTROL_FLAG} reads it again later; write count of instance_group there"
        )
    given = parse_instances(items, configs)
    overrides = merge_overrides(read_overrides(), settings.overrides)
    num_cores, num_gpus = _cores_of_instances(settings.instance_cores), count_gpus()
    chosen = dict(given)
    for config in configs:
        if config.name not in given and not is_controlled and is_left_to_us(config):
            device = parameters_of(config, overrides).get(DEVICE_KEY, "auto")
            if is_cpu(device, num_gpus=num_gpus):
                chosen[config.name] = instances_for(num_cores)
    return {item.name: chosen[item.name] for item in configs if _is_other(item, chosen)}


def parse_instances(items: Sequence[str], configs: Sequence[ModelConfig]) -> dict[str, int]:
    """The number by model that `[MODEL:]N` items give; a model's own item wins over a plain one.

    Raises ConfigError for an item without a number of at least 1, one that is given twice, and one
    that no model can follow.
    """
    numbers: dict[str, int] = {}
    for item in items:
        match = _ITEM.fullmatch(item)
        if match is None or match["model"] == "":
            raise ConfigError(f"--instances {item!r} is not N or MODEL:N; write e.g. --instances 2")
        model, count = (match["model"] or "").strip(), int(match["count"])
        if count < 1:
            raise ConfigError(f"--instances {item!r} is below 1; give 1 or more")
        if model in numbers:
            whose = f"for the model {model}" if model else "for all models"
            raise ConfigError(f"--instances {item!r} is the second {whose}; give it once")
        numbers[model] = count
    return _by_model(numbers, configs)


def _by_model(numbers: Mapping[str, int], configs: Sequence[ModelConfig]) -> dict[str, int]:
    named = {model: count for model, count in numbers.items() if model}
    models = {config.name: config for config in configs}
    for model, count in named.items():
        if model not in models:
            near = nearest(model, models)
            raise ConfigError(
                f"--instances {model}:{count}: no model is called {model!r}; write {near}:{count} "
                "for the nearest"
            )
        _check_ours(models[model], count)
    ours = [config.name for config in configs if config.is_ours]
    if "" in numbers and not ours:
        _check_ours(configs[0], numbers[""])
    chosen = {**{name: numbers[""] for name in ours if "" in numbers}, **named}
    for model, count in chosen.items():
        _check_groups(models[model], count)
    return chosen


def _check_ours(config: ModelConfig, count: int) -> None:
    if not config.is_ours:
        raise ConfigError(
            f"--instances {count}: the model {config.name} is none of this backend; write "
            f"count: {count} into instance_group of {config.directory / 'config.pbtxt'}"
        )


def _check_groups(config: ModelConfig, count: int) -> None:
    if config.num_groups > 1:
        raise ConfigError(
            f"--instances {count}: {config.directory / 'config.pbtxt'} has {config.num_groups} "
            "groups in instance_group, and more than 1 has no single count; write their counts "
            "there"
        )


def is_left_to_us(config: ModelConfig) -> bool:
    """Whether config.pbtxt says no more of the instances of our model than the shipped one does."""
    return config.is_ours and config.num_groups <= 1 and config.instance_count == 1


def is_cpu(device: str, *, num_gpus: int) -> bool:
    """Whether a model with this setting of `device` runs on the CPU."""
    return device == "cpu" or (device == "auto" and not num_gpus)


def instances_for(num_cores: int) -> int:
    """Instances that keep all of these cores busy."""
    return -(-num_cores // CORES_AN_INSTANCE)


def _cores_of_instances(given: range | None) -> int:
    return usable_cores() if given is None else min(usable_cores(), len(given))


def _is_other(config: ModelConfig, chosen: Mapping[str, int]) -> bool:
    return chosen.get(config.name, config.instance_count) != config.instance_count
