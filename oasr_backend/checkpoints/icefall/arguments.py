"""What is said of the training: `train_args.json` or `.yaml`, and the weights file's own keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from oasr_backend.checkpoints.files import check_kind
from oasr_backend.errors import CheckpointError

_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

#: Holds names of its own, none of them an argument.
_NESTED = ("env_info",)


class Said(NamedTuple):
    """A value, and the file that says it."""

    value: Any
    source: Path


def read_arguments(path: Path | None) -> dict[str, Any]:
    """By icefall's names, with `_`; what is null is left out. Empty without a file.

    Raises CheckpointError for a file that cannot be read, that is not flat, or that names one
    argument twice.
    """
    if path is None:
        return {}
    check_kind(path)
    parse = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        loaded = parse(path.read_text(encoding="utf-8"))
    # Dates that are none are a ValueError to the reader, too deep a nesting a RecursionError.
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"cannot read {path} ({reason}); write icefall's arguments by their names, such as "
            '{"num_heads": "4,4,4,8,4,4"}'
        ) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}; write icefall's arguments by their names"
        )
    found: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name in found:
            raise CheckpointError(f"{path} gives {name} twice; leave one of them")
        if isinstance(value, Mapping) and name not in _NESTED:
            raise CheckpointError(
                f"{path}: {key} holds further names; write all arguments side by side"
            )
        found[name] = value
    return {name: value for name, value in found.items() if value is not None}


class Arguments:
    """Arguments of training by name. Where both files have one, they must agree."""

    def __init__(
        self,
        given: Mapping[str, Any],
        stored: Mapping[str, Any],
        *,
        weights: Path,
        path: Path | None,
    ) -> None:
        """`given` are those of the file `path`, `stored` those of the weights file."""
        #: Where an argument that is missing is to be written.
        self.path = path or weights.with_name("train_args.json")
        self._weights = weights
        self._given, self._stored = given, stored

    def get(self, name: str) -> Said | None:
        if self._given.get(name) is not None:
            return Said(self._given[name], self.path)
        if self._stored.get(name) is not None:
            return Said(self._stored[name], self._weights)
        return None

    def flag(self, name: str) -> Said | None:
        """True or False. Raises CheckpointError for what is neither."""
        said = self.get(name)
        if said is None:
            return None
        text = str(said.value).lower()
        if text not in _TRUTHS:
            raise CheckpointError(
                f"{said.source}: {name}={said.value!r} is neither true nor false; write one"
            )
        return Said(_TRUTHS[text], said.source)

    def numbers(self, name: str, count: int) -> Said | None:
        """A tuple of `count` whole numbers; a single one that is written serves all.

        Raises CheckpointError for another count, for what is no whole number, and where the two
        files differ.
        """
        said = self.get(name)
        if said is None:
            return None
        values = _repeated(name, said, count)
        stored = self._stored.get(name)
        if stored is not None:
            own = _repeated(name, Said(stored, self._weights), count)
            if own != values:
                raise CheckpointError(
                    f"{said.source}: {name}={written(values)}, but {self._weights} was trained "
                    f"with {written(own)}; take it out of {said.source.name}, or correct it"
                )
        return Said(values, said.source)

    def number(self, name: str) -> Said | None:
        """As `numbers`, a single one."""
        said = self.numbers(name, 1)
        return None if said is None else Said(said.value[0], said.source)


def whole_numbers(name: str, said: Said) -> tuple[int, ...]:
    """Of a number, a list, or a text of numbers between commas. Raises CheckpointError."""
    value = said.value
    parts = value.strip("()[] ").split(",") if isinstance(value, str) else value
    parts = [parts] if isinstance(parts, int) else parts
    try:
        if isinstance(value, bool) or not isinstance(parts, Sequence) or not parts:
            raise ValueError(value)
        return tuple(int(str(part)) for part in parts)
    except ValueError as error:
        raise CheckpointError(
            f"{said.source}: {name}={value!r} is no whole number, and no list of some; write it as "
            'icefall does, such as "4,4,4,8,4,4"'
        ) from error


def written(values: Sequence[int]) -> str:
    """As icefall writes a list of numbers."""
    return ",".join(map(str, values))


def _repeated(name: str, said: Said, count: int) -> tuple[int, ...]:
    values = whole_numbers(name, said)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise CheckpointError(
            f"{said.source}: {name}={written(values)} has {len(values)} values, and the weights "
            f"have {count} stacks; give one for each, or one for all"
            if count > 1
            else f"{said.source}: {name}={written(values)} has {len(values)} values; give one"
        )
    return values
