"""The attention decoder of a WeNet checkpoint, or why it cannot be used.

A fault in it costs rescoring alone: the encoder and its CTC head serve without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from oasr_backend.checkpoints.weights import Tensors, Weights, copy_layer, load_strictly
from oasr_backend.checkpoints.wenet.biases import supply_zero_biases
from oasr_backend.checkpoints.wenet.unused import is_ignored, unused
from oasr_backend.decoders.second_pass.base import NoDecoder
from oasr_backend.errors import CheckpointError
from oasr_backend.models.attention_decoder import AttentionDecoder, AttentionDecoderConfig
from oasr_backend.models.conformer import ACTIVATIONS
from oasr_backend.models.rescoring import RescoringDecoder

logger = logging.getLogger(__name__)

#: decoder_conf options of which one value can be used, and that value, which is WeNet's default.
_ONLY: dict[str, Any] = {
    "input_layer": "embed",
    "use_output_layer": True,
    "normalize_before": True,
    "src_attention": True,
    "concat_after": False,
    "layer_norm_type": "layer_norm",
    "mlp_type": "position_wise_feed_forward",
}
_FREE = {
    "attention_heads", "linear_units", "num_blocks", "r_num_blocks", "activation_type", "norm_eps",
    "n_kv_head", "head_dim",
}  # fmt: skip
#: They matter to training only, or say which tensors exist or are equal.
_IGNORED = {
    "dropout_rate", "positional_dropout_rate", "self_attention_dropout_rate",
    "src_attention_dropout_rate", "gradient_checkpointing", "use_sdpa", "query_bias", "key_bias",
    "value_bias", "mlp_bias", "tie_word_embedding", "n_expert", "n_expert_activated",
}  # fmt: skip


def load_decoder(
    config: Mapping[str, Any], weights: Weights, *, vocab_size: int, model_dim: int
) -> RescoringDecoder | NoDecoder:
    """`config` is train.yaml, `weights` are those of final.pt, the decoder's under `decoder.`."""
    if not any(name.startswith("decoder.") for name in weights.left):
        return NoDecoder()
    try:
        return _decoder(config, weights, vocab_size=vocab_size, model_dim=model_dim)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = f"the attention decoder of the checkpoint cannot be used ({error})"
        logger.warning("event=no_rescoring %s", reason)
        return NoDecoder(reason)


def _decoder(
    config: Mapping[str, Any], weights: Weights, *, vocab_size: int, model_dim: int
) -> RescoringDecoder:
    kind = config.get("decoder", "bitransformer")
    if kind not in ("transformer", "bitransformer"):
        raise _unusable("decoder", kind, "transformer or bitransformer")
    supply_zero_biases(weights, "decoder.", config.get("decoder_conf") or {})
    left = _sizes(config, vocab_size=vocab_size, model_dim=model_dim)
    sos, eos = _sentence_ends(config, vocab_size)
    if kind == "transformer":
        return RescoringDecoder(_direction(weights, "decoder", left), sos=sos, eos=eos)
    reverse_weight = float((config.get("model_conf") or {}).get("reverse_weight", 0.0))
    if not 0.0 <= reverse_weight <= 1.0:
        raise _unusable("model_conf.reverse_weight", reverse_weight, "0 .. 1")
    num_layers = int((config.get("decoder_conf") or {}).get("r_num_blocks", 0))
    right = replace(left, num_layers=num_layers)
    return RescoringDecoder(
        _direction(weights, "decoder.left_decoder", left),
        # What has no say in a score need not be computed.
        _direction(weights, "decoder.right_decoder", right) if reverse_weight else None,
        sos=sos,
        eos=eos,
        reverse_weight=reverse_weight,
    )


def _sizes(config: Mapping[str, Any], *, vocab_size: int, model_dim: int) -> AttentionDecoderConfig:
    """Those of the direction from left to right. Defaults are WeNet's."""
    options = dict(config.get("decoder_conf") or {})
    num_heads = int(options.get("attention_heads", 4))
    _check_options(options, model_dim=model_dim, num_heads=num_heads)
    return AttentionDecoderConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=int(options.get("num_blocks", 6)),
        num_heads=num_heads,
        feed_forward_dim=int(options.get("linear_units", 2048)),
        activation=str(options.get("activation_type", "relu")),
        norm_eps=float(options.get("norm_eps", 1e-5)),
    )


def _check_options(options: Mapping[str, Any], *, model_dim: int, num_heads: int) -> None:
    unknown = sorted(set(options) - set(_ONLY) - _FREE - _IGNORED)
    if unknown:
        raise _unusable(f"decoder_conf.{unknown[0]}", options[unknown[0]], "nothing of that name")
    for name, served in _ONLY.items():
        if options.get(name, served) != served:
            raise _unusable(f"decoder_conf.{name}", options[name], repr(served))
    if options.get("activation_type", "relu") not in ACTIVATIONS:
        known = " or ".join(sorted(ACTIVATIONS))
        raise _unusable("decoder_conf.activation_type", options["activation_type"], known)
    if num_heads < 1 or model_dim % num_heads:
        raise _unusable("decoder_conf.attention_heads", num_heads, f"a divisor of {model_dim}")
    for name, served in (("n_kv_head", num_heads), ("head_dim", model_dim // num_heads)):
        if options.get(name) not in (None, served):
            raise _unusable(f"decoder_conf.{name}", options[name], str(served))


def _sentence_ends(config: Mapping[str, Any], vocab_size: int) -> tuple[int, int]:
    """<sos> and <eos>; WeNet takes the last unit for both where train.yaml names none."""
    special = (config.get("tokenizer_conf") or {}).get("special_tokens") or {}
    sos, eos = (int(special.get(name, vocab_size - 1)) for name in ("<sos>", "<eos>"))
    for name, unit in (("<sos>", sos), ("<eos>", eos)):
        if not 0 <= unit < vocab_size:
            raise _unusable(f"special_tokens.{name}", unit, f"0 .. {vocab_size - 1}")
    return sos, eos


def _direction(source: Weights, old: str, config: AttentionDecoderConfig) -> AttentionDecoder:
    target: Tensors = {"embedding.weight": source.take(f"{old}.embed.0.weight")}
    for index in range(config.num_layers):
        _layer(source, target, f"{old}.decoders.{index}", f"layers.{index}")
    copy_layer(source, target, f"{old}.after_norm", "norm")
    copy_layer(source, target, f"{old}.output_layer", "output")
    decoder = AttentionDecoder(config)
    load_strictly(decoder, target, source)
    _check_all_used(source, f"{old}.")
    return decoder


def _check_all_used(source: Weights, start: str) -> None:
    """Raises CheckpointError for a tensor of this direction that train.yaml says nothing of."""
    left = [name for name in source.left if name.startswith(start)]
    strays = [name for name in left if not is_ignored(name, but="attention_decoder")]
    if strays:
        raise CheckpointError(unused([source.name_in_file(name) for name in strays]))


def _layer(source: Weights, target: Tensors, old: str, new: str) -> None:
    blocks = ("self_attention", "norm1"), ("cross_attention", "norm2"), ("feed_forward", "norm3")
    for block, norm in blocks:
        copy_layer(source, target, f"{old}.{norm}", f"{new}.{block}.norm")
    _side_by_side(source, target, f"{old}.self_attn.linear_", "qkv", f"{new}.self_attention.qkv")
    copy_layer(source, target, f"{old}.self_attn.linear_out", f"{new}.self_attention.project")
    cross = f"{new}.cross_attention"
    copy_layer(source, target, f"{old}.src_attn.linear_q", f"{cross}.query")
    _side_by_side(source, target, f"{old}.src_attn.linear_", "kv", f"{cross}.key_value")
    copy_layer(source, target, f"{old}.src_attn.linear_out", f"{cross}.project")
    copy_layer(source, target, f"{old}.feed_forward.w_1", f"{new}.feed_forward.expand")
    copy_layer(source, target, f"{old}.feed_forward.w_2", f"{new}.feed_forward.contract")


def _side_by_side(source: Weights, target: Tensors, old: str, parts: str, new: str) -> None:
    """Layers of one input, named by a letter each, as one layer."""
    found: Tensors = {}
    for part in parts:
        copy_layer(source, found, f"{old}{part}", part)
    for kind in ("weight", "bias"):
        target[f"{new}.{kind}"] = torch.cat([found[f"{part}.{kind}"] for part in parts])


def _unusable(name: str, value: object, served: str) -> CheckpointError:
    return CheckpointError(f"train.yaml has {name}={value!r}, and this backend can use {served}")
