"""Tensors of a state dict under their old names, put under new ones."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from oasr_backend.errors import CheckpointError

Tensors = dict[str, Tensor]

_SERVED_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Weights:
    """The tensors of one file by name. It knows which were taken, so that none is lost in silence.

    For messages: `path` is the file, `described_by` the one that says which tensors it has, None
    where they say so themselves, and `prefix` what stands before all names in it.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        path: Path,
        *,
        described_by: Path | None,
        prefix: str = "",
    ) -> None:
        self.path = path
        self._described_by = described_by
        self._prefix = prefix
        self._tensors = dict(tensors)
        self._left = dict.fromkeys(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def misfit(self) -> str:
        """What is wrong where a tensor is missing or of another shape, in a clause."""
        if self._described_by is None:
            return "is not one whole model"
        return f"does not match its {self._described_by.name}"

    @property
    def names(self) -> list[str]:
        """Those of all tensors, in the file's order."""
        return list(self._tensors)

    @property
    def left(self) -> list[str]:
        """Names of the tensors that are not taken yet, in the file's order."""
        return list(self._left)

    def untaken(self) -> Weights:
        """The same tensors, none of them taken."""
        fresh = copy.copy(self)
        fresh._left = dict.fromkeys(self._tensors)
        return fresh

    def name_in_file(self, name: str) -> str:
        return self._prefix + name

    def dtype_of(self, name: str) -> torch.dtype:
        """The type in the file; `take` widens or narrows it."""
        return self._tensors[name].dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError for a tensor that is missing."""
        return tuple(self._found(name).shape)

    def take(self, name: str) -> Tensor:
        """As float32.

        Raises CheckpointError for a tensor that is missing, holds no values or none of a served
        type, or holds NaN or infinity.
        """
        tensor = self._found(name)
        if tensor.is_meta or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{self.path}: {self.name_in_file(name)!r} is of layout {tensor.layout} on device "
                f"{tensor.device}, and weights are dense and hold their values; save it that way"
            )
        if tensor.dtype not in _SERVED_TYPES:
            raise CheckpointError(
                f"{self.path}: {self.name_in_file(name)!r} is of type {tensor.dtype}, and weights "
                "are float16, bfloat16, float32 or float64; give the checkpoint before it was "
                "quantised"
            )
        self._left.pop(name, None)
        tensor = tensor.float()
        check_finite(self.name_in_file(name), tensor, self.path)
        return tensor

    def _found(self, name: str) -> Tensor:
        if name not in self._tensors:
            remedy = "" if self._described_by else ", so export it again"
            raise CheckpointError(
                f"{self.path} has no tensor {self.name_in_file(name)!r}; it {self.misfit}{remedy}"
            )
        return self._tensors[name]

    def supply_zero_biases(self, start: str, layers: Collection[str]) -> None:
        """Gives zeros to those of the `layers` with names from `start` on that have no bias."""
        for name, weight in list(self._tensors.items()):
            layer, _, kind = name.rpartition(".")
            is_one = name.startswith(start) and layer.rpartition(".")[2] in layers
            if is_one and kind == "weight" and weight.dim():
                self._tensors.setdefault(f"{layer}.bias", torch.zeros(weight.shape[0]))


def check_finite(name: str, tensor: Tensor, path: Path) -> None:
    """Raises CheckpointError with the number of values that are NaN or infinite."""
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise CheckpointError(
            f"{path}: {bad} of {tensor.numel()} values of {name!r} are not finite, so every text "
            "would be nonsense; the training diverged or the file is damaged: take the checkpoint "
            "of an earlier step, or copy it again"
        )


def load_strictly(module: torch.nn.Module, weights: Tensors, source: Weights) -> None:
    """Puts `weights`, which were made of those of `source`, into the module.

    Raises CheckpointError naming a tensor of the wrong shape or value, or one not given.
    """
    path = source.path
    expected = module.state_dict()
    for name in [name for name in expected if name in weights]:
        if weights[name].shape != expected[name].shape:
            raise CheckpointError(
                f"{path} {source.misfit}: {name} is of shape {tuple(weights[name].shape)}, not "
                f"{tuple(expected[name].shape)}"
            )
        # Finite tensors may fold to what is not: a variance below zero has no root.
        check_finite(name, weights[name], path)
    outcome = module.load_state_dict(weights, strict=False)
    if outcome.missing_keys:
        raise CheckpointError(f"{path} gives no value for {outcome.missing_keys[0]}")
    if outcome.unexpected_keys:
        raise CheckpointError(f"{path} gives a value for {outcome.unexpected_keys[0]}, unused")


def copy_layer(source: Weights, target: Tensors, old: str, new: str, *, scale: float = 1.0) -> None:
    """One weight (last axis of a pointwise convolution dropped) and its bias."""
    weight = source.take(f"{old}.weight")
    if weight.dim() == 3 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    bias = source.take(f"{old}.bias")
    target[f"{new}.weight"], target[f"{new}.bias"] = weight * scale, bias * scale
