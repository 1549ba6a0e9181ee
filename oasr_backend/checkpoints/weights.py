"""Tensors of a state dict under their old names, put under new ones."""

from __future__ import annotations

import torch
from torch import Tensor

from oasr_backend.errors import CheckpointError

Weights = dict[str, Tensor]


def take(weights: Weights, name: str) -> Tensor:
    """Raises CheckpointError for a tensor that is missing or holds NaN or infinity."""
    try:
        tensor = weights[name]
    except KeyError:
        raise CheckpointError(
            f"final.pt has no tensor {name!r}; it does not match its train.yaml"
        ) from None
    _check_finite(name, tensor)
    return tensor


def take_bias(weights: Weights, name: str, size: int) -> Tensor:
    """As `take`; zeros where there is none."""
    return take(weights, name) if name in weights else torch.zeros(size)


def _check_finite(name: str, tensor: Tensor) -> None:
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise CheckpointError(
            f"final.pt: {bad} of {tensor.numel()} values of {name!r} are not finite, so every text "
            "would be nonsense; the training diverged or the file is damaged: take the checkpoint "
            "of an earlier step, or copy it again"
        )


def load_strictly(module: torch.nn.Module, weights: Weights) -> None:
    """Raises CheckpointError naming a tensor of the wrong shape or value, or one not given."""
    derived = {"position_PHC", "position_bias_PH"}
    expected = module.state_dict()
    for name in weights.keys() & expected.keys():
        if weights[name].shape != expected[name].shape:
            raise CheckpointError(
                f"final.pt does not match its train.yaml: {name} is of shape "
                f"{tuple(weights[name].shape)}, not {tuple(expected[name].shape)}"
            )
        # Finite tensors may fold to what is not: a variance below zero has no root.
        _check_finite(name, weights[name])
    outcome = module.load_state_dict(weights, strict=False)
    missing = [name for name in outcome.missing_keys if name.rpartition(".")[2] not in derived]
    if missing:
        raise CheckpointError(f"final.pt gives no value for {missing[0]}")


def copy_layer(source: Weights, target: Weights, old: str, new: str, *, scale: float = 1.0) -> None:
    """One weight (last axis of a pointwise convolution dropped) and its bias, zero if absent."""
    weight = take(source, f"{old}.weight")
    if weight.dim() == 3 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    bias = take_bias(source, f"{old}.bias", weight.shape[0])
    target[f"{new}.weight"], target[f"{new}.bias"] = weight * scale, bias * scale
