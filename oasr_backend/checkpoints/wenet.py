"""Loads a WeNet U2/U2++ directory as it is: names in, our weights out.

The directory holds `train.yaml`, `final.pt`, `units.txt` and, where the configuration names one,
the CMVN statistics and a SentencePiece model. Without an attention decoder, or with
one that cannot be used, there is no rescoring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oasr_backend.acoustic_model import AcousticModel
from oasr_backend.checkpoints.weights import Weights, copy_layer, load_strictly, take, take_bias
from oasr_backend.checkpoints.wenet_config import conformer_config, fbank_config, read_train_yaml
from oasr_backend.checkpoints.wenet_decoder import load_decoder
from oasr_backend.checkpoints.wenet_tokenizer import read_tokenizer
from oasr_backend.encoders.conformer import ConformerConfig, ConformerEncoder
from oasr_backend.errors import CheckpointError
from oasr_backend.features import GlobalCmvn, LogMelFilterbank, load_cmvn
from oasr_backend.rescoring import NoDecoder, RescoringDecoder
from oasr_backend.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model directory: float32 weights on the CPU, not yet prepared for serving."""

    model: AcousticModel
    tokenizer: Tokenizer
    decoder: RescoringDecoder | NoDecoder = field(default_factory=NoDecoder)


def load_wenet(checkpoint_dir: str | Path) -> Checkpoint:
    """Raises CheckpointError naming the file or option that is missing or cannot be honoured."""
    directory = Path(checkpoint_dir)
    config = read_train_yaml(_existing(directory, "train.yaml"))
    encoder_config = conformer_config(config)
    weights = _read_weights(_existing(directory, "final.pt"))
    ctc_weight = take(weights, "ctc.ctc_lo.weight")
    encoder = ConformerEncoder(encoder_config)
    try:
        load_strictly(encoder, _encoder_weights(weights, encoder_config))
    except RuntimeError as error:
        raise CheckpointError(
            f"{directory / 'final.pt'} does not fit its train.yaml: {error}; take both from one "
            "training"
        ) from error
    model = AcousticModel(
        filterbank=LogMelFilterbank(fbank_config(config)),
        cmvn=_load_cmvn(directory, config, weights),
        encoder=encoder,
        vocab_size=ctc_weight.shape[0],
        blank_id=int((config.get("ctc_conf") or {}).get("ctc_blank_id", 0)),
    )
    load_strictly(model.ctc, {"weight": ctc_weight, "bias": take(weights, "ctc.ctc_lo.bias")})
    tokenizer = read_tokenizer(_existing(directory, "units.txt"), config)
    if tokenizer.vocab_size < model.vocab_size:
        raise CheckpointError(
            f"{directory / 'units.txt'} names {tokenizer.vocab_size} units, but the CTC head of "
            f"final.pt has {model.vocab_size}; the two files are not of the same model"
        )
    return Checkpoint(
        model=model,
        tokenizer=tokenizer,
        decoder=load_decoder(
            config, weights, vocab_size=model.vocab_size, model_dim=encoder_config.model_dim
        ),
    )


def _existing(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist; a WeNet checkpoint directory holds train.yaml, final.pt, "
            "units.txt and the CMVN file that train.yaml names. Copy it there, or point "
            "checkpoint_dir elsewhere"
        )
    return path


def _read_weights(path: Path) -> Weights:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path} ({path.stat().st_size} bytes): it is damaged, incomplete or no "
            "PyTorch state dict; copy it again"
        ) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds no state dict; export one with WeNet's average_model")
    tensors = loaded.get("model", loaded)
    return {name: value.float() for name, value in tensors.items() if isinstance(value, Tensor)}


def _load_cmvn(directory: Path, config: Mapping[str, Any], weights: Weights) -> GlobalCmvn | None:
    settings = config.get("cmvn_conf") or config
    name = settings.get("cmvn_file")
    if name is not None:
        # Training machines write absolute paths; the file travels beside the weights.
        path = _existing(directory, Path(str(name)).name)
        return load_cmvn(path, is_json=bool(settings.get("is_json_cmvn", True)))
    if "encoder.global_cmvn.mean" in weights:
        mean_F, istd_F = (weights[f"encoder.global_cmvn.{part}"] for part in ("mean", "istd"))
        return GlobalCmvn(mean_F, istd_F)
    return None


def _encoder_weights(source: Weights, config: ConformerConfig) -> Weights:
    target: Weights = {}
    _subsampling(source, target, config)
    for index in range(config.num_layers):
        _layer(source, target, config, index)
    copy_layer(source, target, "encoder.after_norm", "norm")
    return target


def _subsampling(source: Weights, target: Weights, config: ConformerConfig) -> None:
    stage = 0
    while f"encoder.embed.conv.{2 * stage}.weight" in source:
        name = f"encoder.embed.conv.{2 * stage}"
        target[f"subsampling.stages.{stage}.weight"] = take(source, f"{name}.weight")
        target[f"subsampling.stages.{stage}.bias"] = take(source, f"{name}.bias")
        stage += 1
    old = (
        "encoder.embed.out.0" if "encoder.embed.out.0.weight" in source else "encoder.embed.linear"
    )
    # The position encoding multiplies its input by sqrt(model_dim).
    copy_layer(source, target, old, "subsampling.project", scale=config.model_dim**0.5)
    weight = target["subsampling.project.weight"]
    by_channel = weight.view(weight.shape[0], config.model_dim, -1)
    target["subsampling.project.weight"] = by_channel.transpose(1, 2).reshape_as(weight)


def _layer(source: Weights, target: Weights, config: ConformerConfig, index: int) -> None:
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
    source: Weights, target: Weights, old: tuple[str, str], new: str, *, scale: float
) -> None:
    block, norm = old
    copy_layer(source, target, norm, f"{new}.norm")
    copy_layer(source, target, f"{block}.w_1", f"{new}.expand")
    copy_layer(source, target, f"{block}.w_2", f"{new}.contract", scale=scale)


def _attention(source: Weights, target: Weights, old: str, new: str) -> None:
    parts: Weights = {}
    for part in ("q", "k", "v"):
        copy_layer(source, parts, f"{old}.self_attn.linear_{part}", part)
    for kind in ("weight", "bias"):
        target[f"{new}.attention.qkv.{kind}"] = torch.cat([parts[f"{p}.{kind}"] for p in "qkv"])
    copy_layer(source, target, f"{old}.norm_mha", f"{new}.attention.norm")
    copy_layer(source, target, f"{old}.self_attn.linear_out", f"{new}.attention.project")
    target[f"{new}.attention.bias_u_HC"] = take(source, f"{old}.self_attn.pos_bias_u")
    target[f"{new}.attention.bias_v_HC"] = take(source, f"{old}.self_attn.pos_bias_v")
    target[f"{new}.attention.project_position.weight"] = take(
        source, f"{old}.self_attn.linear_pos.weight"
    )


def _convolution(source: Weights, target: Weights, old: str, new: str, *, batch_norm: bool) -> None:
    module, new = f"{old}.conv_module", f"{new}.convolution"
    copy_layer(source, target, f"{old}.norm_conv", f"{new}.norm")
    copy_layer(source, target, f"{module}.pointwise_conv1", f"{new}.gate")
    copy_layer(source, target, f"{module}.pointwise_conv2", f"{new}.project")
    kernel_DK = take(source, f"{module}.depthwise_conv.weight").squeeze(1)
    bias_D = take_bias(source, f"{module}.depthwise_conv.bias", kernel_DK.shape[0])
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
    gain_D = take(source, f"{name}.weight") / torch.sqrt(take(source, f"{name}.running_var") + eps)
    offset_D = take(source, f"{name}.bias") - take(source, f"{name}.running_mean") * gain_D
    return kernel_DK * gain_D.unsqueeze(1), bias_D * gain_D + offset_D
