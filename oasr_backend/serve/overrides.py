"""Server-side settings given on the command line instead of in config.pbtxt.

They reach the model through one environment variable, which the stub process inherits: a JSON
object of strings that wins over the `parameters` of config.pbtxt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from oasr_backend.config import OVERRIDES_VARIABLE
from oasr_backend.errors import ConfigError

CHECKPOINT_KEY = "checkpoint_dir"
DEVICE_KEY = "device"


def collect_overrides(
    settings: Iterable[str], *, checkpoint: Path | None = None, device: str | None = None
) -> dict[str, str]:
    """Merge `--set key=value` items (the last of a key counts) with the named options.

    Raises ConfigError for an item without `=` or key, and for a key that a named option sets too.
    """
    overrides = dict(_parse_setting(setting) for setting in settings)
    named = {"--checkpoint": (CHECKPOINT_KEY, None), "--device": (DEVICE_KEY, device)}
    if checkpoint is not None:
        # The server may run in another folder than the command.
        named["--checkpoint"] = (CHECKPOINT_KEY, str(checkpoint.expanduser().resolve()))
    for option, (key, value) in named.items():
        if value is None:
            continue
        if key in overrides:
            raise ConfigError(f"{key!r} is given by --set and by {option}; give it once")
        overrides[key] = value
    return overrides


def _parse_setting(setting: str) -> tuple[str, str]:
    key, separator, value = setting.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {setting!r} is not KEY=VALUE; write e.g. --set max_streams=64")
    return key.strip(), value


def inherited_overrides(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The overrides already in the environment. Raises ConfigError when they are no JSON object."""
    text = (os.environ if environment is None else environment).get(OVERRIDES_VARIABLE)
    if not text:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(_bad_variable(text)) from error
    if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
        raise ConfigError(_bad_variable(text))
    return values


def _bad_variable(text: str) -> str:
    return (
        f"{OVERRIDES_VARIABLE}={text!r} is not a JSON object of strings; "
        "unset it or use oasr-serve --set"
    )


def encode_overrides(overrides: Mapping[str, str]) -> str:
    return json.dumps(dict(overrides), sort_keys=True)
