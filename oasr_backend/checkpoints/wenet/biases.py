"""Which layers `train.yaml` says go without a bias. Every other bias is required."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oasr_backend.checkpoints.weights import Weights

#: Layers by the option that gives them a bias, which is on unless written down. `query_bias` holds
#: for the attention's output in WeNet's later releases.
_LAYERS = {
    "query_bias": ("linear_q", "linear_out"),
    "key_bias": ("linear_k",),
    "value_bias": ("linear_v",),
    "conv_bias": ("pointwise_conv1", "depthwise_conv", "pointwise_conv2"),
    "mlp_bias": ("w_1", "w_2"),
}


def supply_zero_biases(weights: Weights, start: str, options: Mapping[str, Any]) -> None:
    """Puts zeros for the biases below the name `start` that `options` leave out."""
    for option, layers in _LAYERS.items():
        if not options.get(option, True):
            weights.supply_zero_biases(start, layers)
