"""Settings that win over the `parameters` of config.pbtxt, as a server hands them to its models.

One environment variable holds them, which the process of each model inherits: a JSON object. A key
counts for every model that knows it, and `MODEL:key` for that model alone, which wins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping

from oasr_backend.errors import ConfigError

#: `oasr-serve --set` writes it.
OVERRIDES_VARIABLE = "OASR_BACKEND_OVERRIDES"


def read_overrides(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of an environment; None: of this process. Raises ConfigError for what is no object."""
    text = (os.environ if environment is None else environment).get(OVERRIDES_VARIABLE) or "{}"
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(_malformed(text)) from error
    if not isinstance(values, dict) or not all(map(_is_plain, values.values())):
        raise ConfigError(_malformed(text))
    return {name: str(value) for name, value in values.items()}


def merge_overrides(inherited: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Both, where `given` wins: a common key of it also over one that names a model."""
    left = {name: text for name, text in inherited.items() if split_name(name)[1] not in given}
    return {**left, **given}


def write_overrides(overrides: Mapping[str, str]) -> str:
    """The value of the variable."""
    return json.dumps(dict(overrides), sort_keys=True)


def split_name(name: str) -> tuple[str, str]:
    """A model's name, empty for all models, and the key."""
    model, _, key = name.rpartition(":")
    return model.strip(), key.strip()


def overrides_of(model: str, overrides: Mapping[str, str], known: Container[str]) -> dict[str, str]:
    """What one model takes of them: the common keys that it knows, and all that name it."""
    common, own = {}, {}
    for name, value in overrides.items():
        named, key = split_name(name)
        if named == model:
            own[key] = value
        elif not named and key in known:
            common[key] = value
    return {**common, **own}


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _malformed(text: str) -> str:
    return (
        f"{OVERRIDES_VARIABLE}={text!r} is no JSON object of strings; unset it or use "
        "oasr-serve --set"
    )
