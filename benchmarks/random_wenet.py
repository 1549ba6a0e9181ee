"""Checkpoints in WeNet's layout with random weights.

The default is the common U2 Conformer: 12 layers, model 256, 4 heads, feed-forward 2048, kernel 15,
5000 units.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor


@dataclass(frozen=True)
class WenetSize:
    num_layers: int = 12
    model_dim: int = 256
    num_heads: int = 4
    feed_forward_dim: int = 2048
    conv_kernel_size: int = 15
    vocab_size: int = 5000
    num_mel_bins: int = 80


def write_random_wenet(directory: Path, size: WenetSize | None = None, *, seed: int = 0) -> Path:
    """Writes train.yaml, final.pt and units.txt; returns the directory."""
    size = size or WenetSize()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "train.yaml").write_text(yaml.safe_dump(_train_yaml(size)), encoding="utf-8")
    torch.save(_weights(size, torch.Generator().manual_seed(seed)), directory / "final.pt")
    units = ["<blank>", "<unk>", *(f"▁u{index}" for index in range(2, size.vocab_size))]
    lines = "".join(f"{unit} {index}\n" for index, unit in enumerate(units))
    (directory / "units.txt").write_text(lines, encoding="utf-8")
    return directory


def _train_yaml(size: WenetSize) -> dict[str, Any]:
    return {
        "encoder": "conformer",
        "encoder_conf": {
            "output_size": size.model_dim,
            "attention_heads": size.num_heads,
            "linear_units": size.feed_forward_dim,
            "num_blocks": size.num_layers,
            "input_layer": "conv2d",
            "cnn_module_kernel": size.conv_kernel_size,
            "cnn_module_norm": "layer_norm",
            "activation_type": "swish",
            "causal": True,
            "macaron_style": True,
            "use_dynamic_chunk": True,
        },
        "input_dim": size.num_mel_bins,
        "output_dim": size.vocab_size,
    }


def _weights(size: WenetSize, generator: torch.Generator) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}

    def linear(name: str, *shape: int, bias: bool = True) -> None:
        fan_in = int(torch.tensor(shape[1:]).prod())
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) * fan_in**-0.5
        if bias:
            weights[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.02

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = torch.ones(size.model_dim)
        weights[f"{name}.bias"] = torch.zeros(size.model_dim)

    model_dim, ff_dim = size.model_dim, size.feed_forward_dim
    linear("encoder.embed.conv.0", model_dim, 1, 3, 3)
    linear("encoder.embed.conv.2", model_dim, model_dim, 3, 3)
    mel_frames = ((size.num_mel_bins - 1) // 2 - 1) // 2
    linear("encoder.embed.out.0", model_dim, model_dim * mel_frames)
    for index in range(size.num_layers):
        layer = f"encoder.encoders.{index}"
        for part in ("q", "k", "v", "out"):
            linear(f"{layer}.self_attn.linear_{part}", model_dim, model_dim)
        linear(f"{layer}.self_attn.linear_pos", model_dim, model_dim, bias=False)
        heads = (size.num_heads, model_dim // size.num_heads)
        for part in ("u", "v"):
            name = f"{layer}.self_attn.pos_bias_{part}"
            weights[name] = torch.randn(heads, generator=generator) * 0.1
        for block in ("feed_forward", "feed_forward_macaron"):
            linear(f"{layer}.{block}.w_1", ff_dim, model_dim)
            linear(f"{layer}.{block}.w_2", model_dim, ff_dim)
        linear(f"{layer}.conv_module.pointwise_conv1", 2 * model_dim, model_dim, 1)
        linear(f"{layer}.conv_module.depthwise_conv", model_dim, 1, size.conv_kernel_size)
        norm(f"{layer}.conv_module.norm")
        linear(f"{layer}.conv_module.pointwise_conv2", model_dim, model_dim, 1)
        for part in ("ff", "mha", "ff_macaron", "conv", "final"):
            norm(f"{layer}.norm_{part}")
    norm("encoder.after_norm")
    linear("ctc.ctc_lo", size.vocab_size, model_dim)
    return weights
