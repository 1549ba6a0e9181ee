"""Reads `final.pt`, however training wrapped it: a state dict's tensors under WeNet's own names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oasr_backend.checkpoints.torch_file import load_torch_file
from oasr_backend.checkpoints.weights import Weights
from oasr_backend.errors import CheckpointError

logger = logging.getLogger(__name__)

#: Keys under which trainers put a state dict beside other things, in the order of preference.
_WRAPPERS = ("model", "state_dict", "model_avg")
#: What wrappers of a model put before the names of its tensors.
_PREFIXES = ("module.", "model.", "_orig_mod.")
#: Every CTC model has it, so what stands before it stands before all names.
_ANCHOR = "ctc.ctc_lo.weight"
#: How the names of every model's tensors begin.
_OF_MODEL = ("encoder.", "ctc.", "decoder.")


def read_weights(path: Path, *, described_by: Path) -> Weights:
    """The tensors of `path`, unwrapped, with one log line where there was something to unwrap.

    `described_by` is the train.yaml beside it.

    Raises CheckpointError that says what the file is when it is no state dict.
    """
    state, keys, beside = _unwrapped(load_torch_file(path), path)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    prefix = _prefix(tensors, path)
    _log_unwrapping(path, keys, beside, prefix, tensors)
    bare = _without_prefix(tensors, prefix, path)
    return Weights(bare, path, described_by=described_by, prefix=prefix)


def _unwrapped(loaded: Any, path: Path) -> tuple[Mapping[str, Any], list[str], list[str]]:
    """The innermost state dict, the keys that lead to it, and those of others beside them."""
    keys: list[str] = []
    beside: list[str] = []
    while isinstance(loaded, Mapping):
        found = {key: loaded.get(key) for key in _WRAPPERS}
        inner = [key for key, it in found.items() if isinstance(it, Mapping) and it]
        if not inner:
            break
        keys.append(inner[0])
        beside.extend(inner[1:])
        loaded = found[inner[0]]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}, no state dict; export one with WeNet's "
            "average_model"
        )
    if not any(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(
            f"{path} holds no tensors, but {_listed(loaded)}; a state dict is looked for at the "
            f"top and under {', '.join(_WRAPPERS)}"
        )
    return loaded, keys, beside


def _prefix(tensors: Mapping[str, Tensor], path: Path) -> str:
    """What stands before the names of the model's tensors; empty for nothing."""
    ahead = [name.removesuffix(_ANCHOR) for name in tensors if f".{name}".endswith(f".{_ANCHOR}")]
    if not ahead:
        raise CheckpointError(
            f"{path} has no tensor {_ANCHOR!r}, but {_listed(tensors)}; it is no WeNet model with "
            "a CTC head"
        )
    prefix = min(ahead, key=len)
    if _bare(prefix):
        raise CheckpointError(
            f"{path} names its tensors with {prefix!r} ahead; of such prefixes "
            f"{', '.join(map(repr, _PREFIXES))} are taken off: rename the tensors without it"
        )
    return prefix


def _without_prefix(tensors: Mapping[str, Tensor], prefix: str, path: Path) -> dict[str, Tensor]:
    """A name without the prefix stays as it is: it is none of the model's.

    Raises CheckpointError where some of the model's tensors have another prefix than the rest.
    """
    renamed = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        twice = next(name for name in tensors if prefix + name in tensors)
        raise CheckpointError(
            f"{path} holds {twice!r} twice, with the prefix {prefix!r} and without it; save one "
            "model alone"
        )
    for name in tensors:
        bare = _bare(name)
        if bare.startswith(_OF_MODEL) and name != prefix + bare:
            raise CheckpointError(
                f"{path} names {name!r} with the prefix {name.removesuffix(bare)!r}, but "
                f"{prefix + _ANCHOR!r} with {prefix!r}; give all names of one model the same prefix"
            )
    return renamed


def _bare(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def _listed(names: Mapping[Any, Any], *, most: int = 5) -> str:
    first = ", ".join(repr(name) for name in list(names)[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{first}{more}" if first else "nothing at all"


def _log_unwrapping(
    path: Path, keys: list[str], beside: list[str], prefix: str, tensors: Mapping[str, Tensor]
) -> None:
    dtypes = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if not (keys or prefix or dtypes != {torch.float32}):
        return
    logger.info(
        "event=checkpoint_unwrapped file=%s under=%s not_served=%s prefix=%r dtypes=%s",
        path,
        ".".join(keys) or "-",
        ",".join(beside) or "-",
        prefix,
        ",".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
    )
