"""Tensors under icefall's names, put into modules of ours that name them alike."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from oasr_backend.checkpoints.weights import Weights, load_strictly
from oasr_backend.errors import CheckpointError


def load_named(module: nn.Module, weights: Weights, name_of: Callable[[str], str]) -> None:
    """`name_of` gives the name in the checkpoint of one in the module.

    Raises CheckpointError, by the name in the checkpoint, for a tensor that is missing, of another
    shape or not finite.
    """
    found = {}
    for name, parameter in module.state_dict().items():
        theirs = name_of(name)
        shape, expected = weights.shape_of(theirs), tuple(parameter.shape)
        if shape != expected:
            raise CheckpointError(
                f"{weights.path} {weights.misfit}: {weights.name_in_file(theirs)} is of shape "
                f"{shape}, and beside the other tensors it has to be of {expected}; export the "
                "whole model again"
            )
        found[name] = weights.take(theirs)
    load_strictly(module, found, weights)
