"""Reads icefall's weights files: which of their state dicts is served, and what they say beside it.

`pretrained.pt` holds `model` alone. A file of training holds `model`, `model_avg`, which averages
all of training, the optimizer's state, and every argument of training by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oasr_backend.checkpoints.torch_file import load_torch_file, tensors_by_name
from oasr_backend.checkpoints.weights import Weights
from oasr_backend.errors import CheckpointError

logger = logging.getLogger(__name__)

_MODEL, _AVERAGE = "model", "model_avg"
_PREFIX = "module."
_EXPORT = "export one with icefall's export.py"


class StateFile(NamedTuple):
    """`stored` are the other values of the file by name; most are arguments of training."""

    weights: Weights
    stored: Mapping[str, Any]


def read_state_file(path: Path, *, averaged: bool) -> StateFile:
    """The tensors are read when they are taken; until then the file must stay as it is.

    `averaged` asks for `model_avg`. Logs in one line what is served and what is not. Raises
    CheckpointError that says what the file is when it is none of icefall's.
    """
    loaded = load_torch_file(path, with_paths=True, mapped=True)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, no state dict; {_EXPORT}")
    if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
        loaded = {_MODEL: loaded}
    chosen = _choose(loaded, path, averaged=averaged)
    tensors = tensors_by_name(loaded[chosen], path, key=chosen, remedy=_EXPORT)
    prefix = _prefix(tensors, path)
    left_out = sorted({_MODEL, _AVERAGE} & set(loaded) - {chosen})
    logger.info(
        "event=icefall_state file=%s served=%s not_served=%s prefix=%r dtypes=%s",
        path,
        chosen,
        ",".join(left_out) or "-",
        prefix,
        _dtypes(tensors),
    )
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    stored = {key: it for key, it in loaded.items() if isinstance(key, str) and key != chosen}
    return StateFile(Weights(bare, path, described_by=None, prefix=prefix), stored)


def _choose(loaded: Mapping[Any, Any], path: Path, *, averaged: bool) -> str:
    """The key of the state dict to serve."""
    there = [key for key in (_MODEL, _AVERAGE) if loaded.get(key)]
    if averaged and _AVERAGE not in there:
        raise CheckpointError(
            f"the arguments beside {path} set use_averaged_model, and it holds no {_AVERAGE!r}; "
            "take that out, or give a file of training"
        )
    if not there:
        empty = [key for key in (_MODEL, _AVERAGE) if key in loaded]
        if empty:
            raise CheckpointError(f"{path}: {empty[0]!r} is empty, without one tensor; {_EXPORT}")
        held = ", ".join(repr(key) for key in list(loaded)[:5]) or "nothing at all"
        raise CheckpointError(
            f"{path} holds {held}, and a state dict is looked for under {_MODEL!r} and "
            f"{_AVERAGE!r}; {_EXPORT}"
        )
    return _AVERAGE if averaged else there[0]


def _prefix(tensors: Mapping[str, Tensor], path: Path) -> str:
    """What distributed training puts before every name; empty for nothing."""
    with_prefix = [name for name in tensors if name.startswith(_PREFIX)]
    if with_prefix and len(with_prefix) < len(tensors):
        other = next(name for name in tensors if not name.startswith(_PREFIX))
        raise CheckpointError(
            f"{path} names {with_prefix[0]!r} with the prefix {_PREFIX!r} and {other!r} without "
            "it; give all names of one model the same prefix"
        )
    return _PREFIX if with_prefix else ""


def _dtypes(tensors: Mapping[str, Tensor]) -> str:
    dtypes: set[torch.dtype] = {tensor.dtype for tensor in tensors.values()}
    return ",".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
