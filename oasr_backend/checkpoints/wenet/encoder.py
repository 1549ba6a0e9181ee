"""WeNet's Conformer encoder: its tensors under our names, folded where inference allows it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oasr_backend.checkpoints.weights import Tensors, Weights, copy_layer, load_strictly
from oasr_backend.errors import CheckpointError
from oasr_backend.models.conformer import ConformerConfig, ConformerEncoder
from oasr_backend.models.layers import SUBSAMPLING_KINDS


def load_encoder(config: ConformerConfig, weights: Weights) -> ConformerEncoder:
    """Raises CheckpointError naming a tensor that is missing or of another shape."""
    encoder = ConformerEncoder(config)
    try:
        load_strictly(encoder, _renamed(weights, config), weights)
    except (IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{weights.path} does not fit its train.yaml: {error}; take both from one training"
        ) from error
    return encoder


def _renamed(source: Weights, config: ConformerConfig) -> Tensors:
    target: Tensors = {}
    _subsampling(source, target, config)
    for index in range(config.num_layers):
        _layer(source, target, config, index)
    copy_layer(source, target, "encoder.after_norm", "norm")
    return target


def _subsampling(source: Weights, target: Tensors, config: ConformerConfig) -> None:
    for stage in range(len(SUBSAMPLING_KINDS[config.subsampling].stages)):
        old, new = f"encoder.embed.conv.{2 * stage}", f"subsampling.stages.{stage}"
        target[f"{new}.weight"] = source.take(f"{old}.weight")
        target[f"{new}.bias"] = source.take(f"{old}.bias")
    name = "encoder.embed.out.0"
    old = name if f"{name}.weight" in source else "encoder.embed.linear"
    # The position encoding multiplies its input by sqrt(model_dim).
    copy_layer(source, target, old, "subsampling.project", scale=config.model_dim**0.5)
    weight = target["subsampling.project.weight"]
    by_channel = weight.view(weight.shape[0], config.model_dim, -1)
    target["subsampling.project.weight"] = by_channel.transpose(1, 2).reshape_as(weight)


def _layer(source: Weights, target: Tensors, config: ConformerConfig, index: int) -> None:
    old, new = f"encoder.encoders.{index}", f"layers.{index}"
    ff_scale = 0.5 if config.macaron else 1.0
    if config.macaron:
        _feed_forward(source, target, (f"{old}.feed_forward_macaron", f"{old}.norm_ff_macaron"),
                      f"{new}.macaron", scale=ff_scale)  # fmt: skip
    _feed_forward(source, target, (f"{old}.feed_forward", f"{old}.norm_ff"),
                  f"{new}.feed_forward", scale=ff_scale)  # fmt: skip
    _attention(source, target, old, new)
    _convolution(source, target, old, new, batch_norm=not config.conv_layer_norm)
    copy_layer(source, target, f"{old}.norm_final", f"{new}.norm")


def _feed_forward(
    source: Weights, target: Tensors, old: tuple[str, str], new: str, *, scale: float
) -> None:
    block, norm = old
    copy_layer(source, target, norm, f"{new}.norm")
    copy_layer(source, target, f"{block}.w_1", f"{new}.expand")
    copy_layer(source, target, f"{block}.w_2", f"{new}.contract", scale=scale)


def _attention(source: Weights, target: Tensors, old: str, new: str) -> None:
    parts: Tensors = {}
    for part in ("q", "k", "v"):
        copy_layer(source, parts, f"{old}.self_attn.linear_{part}", part)
    for kind in ("weight", "bias"):
        target[f"{new}.attention.qkv.{kind}"] = torch.cat([parts[f"{p}.{kind}"] for p in "qkv"])
    copy_layer(source, target, f"{old}.norm_mha", f"{new}.attention.norm")
    copy_layer(source, target, f"{old}.self_attn.linear_out", f"{new}.attention.project")
    target[f"{new}.attention.bias_u_HC"] = source.take(f"{old}.self_attn.pos_bias_u")
    target[f"{new}.attention.bias_v_HC"] = source.take(f"{old}.self_attn.pos_bias_v")
    target[f"{new}.attention.project_position.weight"] = source.take(
        f"{old}.self_attn.linear_pos.weight"
    )


def _convolution(source: Weights, target: Tensors, old: str, new: str, *, batch_norm: bool) -> None:
    module, new = f"{old}.conv_module", f"{new}.convolution"
    copy_layer(source, target, f"{old}.norm_conv", f"{new}.norm")
    copy_layer(source, target, f"{module}.pointwise_conv1", f"{new}.gate")
    copy_layer(source, target, f"{module}.pointwise_conv2", f"{new}.project")
    kernel_DK = source.take(f"{module}.depthwise_conv.weight").squeeze(1)
    bias_D = source.take(f"{module}.depthwise_conv.bias")
    rest_D = F.glu(target[f"{new}.gate.bias"], dim=0)
    # The state is kept relative to the gate of a zero frame; the bias gives that part back.
    bias_D = bias_D + rest_D * kernel_DK.sum(1)
    if batch_norm:
        kernel_DK, bias_D = _fold_batch_norm(source, f"{module}.norm", kernel_DK, bias_D)
    else:
        copy_layer(source, target, f"{module}.norm", f"{new}.inner_norm")
    target[f"{new}.rest_D"] = rest_D
    target[f"{new}.depthwise.weight"] = kernel_DK.unsqueeze(1).unsqueeze(1)
    target[f"{new}.depthwise.bias"] = bias_D


def _fold_batch_norm(
    source: Weights, name: str, kernel_DK: Tensor, bias_D: Tensor, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    gain_D = source.take(f"{name}.weight") / torch.sqrt(source.take(f"{name}.running_var") + eps)
    offset_D = source.take(f"{name}.bias") - source.take(f"{name}.running_mean") * gain_D
    return kernel_DK * gain_D.unsqueeze(1), bias_D * gain_D + offset_D
