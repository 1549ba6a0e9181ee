"""Settings given on the command line instead of in config.pbtxt, and the models that know them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from oasr_backend.config import KEYS
from oasr_backend.errors import ConfigError
from oasr_backend.serve.repository import ModelConfig
from oasr_backend.triton_backend.overrides import overrides_of, split_name

CHECKPOINT_KEY = "checkpoint_dir"
DEVICE_KEY = "device"


def collect_overrides(
    settings: Iterable[str],
    *,
    checkpoints: Iterable[str] = (),
    device: str | None = None,
    models: Sequence[str] = (),
) -> dict[str, str]:
    """Merge `--set [MODEL:]key=value` items (the last of a key counts) with the named options.

    settings     items of --set
    checkpoints  items of --checkpoint: a folder, or MODEL:folder for one of `models`
    models       the names of the repository's models

    Raises ConfigError for an item without `=` or key, for a key that is given in two ways, and for
    a folder after the name of no model.
    """
    overrides = dict(_parse_setting(setting) for setting in settings)
    named = [("--checkpoint", *_parse_checkpoint(item, models)) for item in checkpoints]
    if device is not None:
        named.append(("--device", DEVICE_KEY, device))
    by_option: dict[str, str] = {}
    for option, name, value in named:
        if name in overrides:
            raise ConfigError(f"{name!r} is given by --set and by {option}; give it once")
        if name in by_option:
            raise ConfigError(f"{option} gives {name!r} twice; give it once for each model")
        by_option[name] = value
    return {**overrides, **by_option}


def _parse_setting(setting: str) -> tuple[str, str]:
    name, separator, value = setting.partition("=")
    model, key = split_name(name)
    if not separator or not key or (":" in name and not model):
        raise ConfigError(
            f"--set {setting!r} is not KEY=VALUE or MODEL:KEY=VALUE; write e.g. --set "
            "max_streams=64"
        )
    return _joined(model, key), value


def _parse_checkpoint(item: str, models: Sequence[str]) -> tuple[str, str]:
    """A folder's name may hold a colon too: what stands before it must be a model's name."""
    model, separator, folder = item.partition(":")
    if model not in models:
        if separator and models and "/" not in model and not Path(item).expanduser().exists():
            raise ConfigError(
                f"--checkpoint {item!r}: no model is called {model!r}, and no folder {item!r} "
                f"exists; did you mean {_joined(nearest(model, models), folder)!r}?"
            )
        model, folder = "", item
    # The server may run in another folder than the command.
    return _joined(model, CHECKPOINT_KEY), str(Path(folder).expanduser().resolve())


def _joined(model: str, key: str) -> str:
    return f"{model}:{key}" if model else key


def known_keys(config: ModelConfig) -> set[str]:
    """The keys that a model knows: those of its config.pbtxt, and of this backend if it is ours."""
    return set(config.parameters) | (set(KEYS) if config.is_ours else set())


def parameters_of(config: ModelConfig, overrides: Mapping[str, str]) -> dict[str, str]:
    """The parameters that the model will have."""
    return {**config.parameters, **overrides_of(config.name, overrides, known_keys(config))}


def unknown_names(
    configs: Sequence[ModelConfig], overrides: Mapping[str, str]
) -> Iterable[tuple[str, str]]:
    """What no model of the repository knows, and what to write instead."""
    models = {config.name: known_keys(config) for config in configs}
    for name in overrides:
        model, key = split_name(name)
        if model and model not in models:
            yield (
                f"no model is called {model!r}",
                f"write {nearest(model, models)}:{key} for the nearest",
            )
            continue
        known = models[model] if model else set().union(*models.values())
        if key not in known:
            owner = f"the model {model} knows no" if model else "no model knows the"
            remedy = f"did you mean {_joined(model, nearest(key, known))!r}?" if known else ""
            yield f"{owner} parameter {key!r}", remedy


def nearest(name: str, known: Iterable[str]) -> str:
    """Of the known names, at least one, that which is most like this one."""
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
