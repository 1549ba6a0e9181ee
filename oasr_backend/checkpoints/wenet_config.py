"""What `train.yaml` of a WeNet checkpoint says, checked: every option is honoured or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from oasr_backend.encoders.conformer import ACTIVATIONS, ConformerConfig
from oasr_backend.encoders.layers import SUBSAMPLING_KINDS
from oasr_backend.errors import CheckpointError
from oasr_backend.features import FbankConfig

#: encoder_conf options of which exactly one value can be served, and that value.
_ONLY: dict[str, Any] = {
    "pos_enc_layer_type": "rel_pos",
    "selfattention_layer_type": "rel_selfattn",
    "positionwise_layer_type": "linear",
    "mlp_type": "position_wise_feed_forward",
    "layer_norm_type": "layer_norm",
    "normalize_before": True,
    "concat_after": False,
    "causal": True,
    "use_cnn_module": True,
    "final_norm": True,
    "conv_inner_factor": 2,
    "static_chunk_size": 0,
    "use_dynamic_chunk": True,
    "global_cmvn": None,
}
#: Values that WeNet assumes when such an option is not written down.
_WENET_DEFAULT: dict[str, Any] = {"causal": False, "use_dynamic_chunk": False}
_FREE = {
    "output_size", "attention_heads", "linear_units", "num_blocks", "input_layer",
    "activation_type", "macaron_style", "cnn_module_kernel", "cnn_module_norm", "norm_eps",
    "n_kv_head", "head_dim", "positionwise_conv_kernel_size",
}  # fmt: skip
#: They matter to training only, or say which biases exist, which the weights say too.
_IGNORED = {
    "dropout_rate", "positional_dropout_rate", "attention_dropout_rate", "gradient_checkpointing",
    "use_dynamic_left_chunk", "use_sdpa", "query_bias", "key_bias", "value_bias", "conv_bias",
}  # fmt: skip


def read_train_yaml(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no mapping; a WeNet train.yaml is expected")
    return config


def conformer_config(config: Mapping[str, Any]) -> ConformerConfig:
    """The encoder that `train.yaml` describes.

    Raises CheckpointError naming the first option that cannot be honoured.
    """
    if config.get("encoder") != "conformer":
        raise _refuse("encoder", config.get("encoder"), "conformer")
    options = dict(config.get("encoder_conf") or {})
    _check_options(options)
    model_dim = int(options.get("output_size", 256))
    num_heads = int(options.get("attention_heads", 4))
    return ConformerConfig(
        num_mel_bins=_num_mel_bins(config),
        model_dim=model_dim,
        num_layers=int(options.get("num_blocks", 6)),
        num_heads=num_heads,
        num_kv_heads=int(options.get("n_kv_head") or num_heads),
        head_dim=int(options.get("head_dim") or model_dim // num_heads),
        feed_forward_dim=int(options.get("linear_units", 2048)),
        conv_kernel_size=int(options.get("cnn_module_kernel", 15)),
        subsampling=str(options.get("input_layer", "conv2d")),
        activation=str(options.get("activation_type", "swish")),
        macaron=bool(options.get("macaron_style", True)),
        conv_layer_norm=options.get("cnn_module_norm", "batch_norm") == "layer_norm",
        norm_eps=float(options.get("norm_eps", 1e-5)),
    )


def fbank_config(config: Mapping[str, Any]) -> FbankConfig:
    """The filterbank of `dataset_conf`; dither is a training device and is not applied."""
    dataset = config.get("dataset_conf") or {}
    if "fbank_conf" not in dataset and ({"mfcc_conf", "log_mel_spectrogram_conf"} & set(dataset)):
        raise _refuse("dataset_conf", "features other than fbank", "fbank_conf")
    fbank = dataset.get("fbank_conf") or {}
    return FbankConfig(
        sample_rate=int((dataset.get("resample_conf") or {}).get("resample_rate", 16000)),
        num_mel_bins=_num_mel_bins(config),
        frame_length_ms=float(fbank.get("frame_length", 25)),
        frame_shift_ms=float(fbank.get("frame_shift", 10)),
    )


def _num_mel_bins(config: Mapping[str, Any]) -> int:
    fbank = (config.get("dataset_conf") or {}).get("fbank_conf") or {}
    return int(config.get("input_dim", fbank.get("num_mel_bins", 80)))


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(_ONLY) - _FREE - _IGNORED)
    if unknown:
        raise CheckpointError(
            f"encoder_conf.{unknown[0]}={options[unknown[0]]!r} is unknown to this backend; "
            "remove it if it does not change inference"
        )
    for name, served in _ONLY.items():
        value = options.get(name, _WENET_DEFAULT.get(name, served))
        if value != served:
            raise _refuse(f"encoder_conf.{name}", value, served)
    _check_choice(options, "input_layer", "conv2d", SUBSAMPLING_KINDS)
    _check_choice(options, "activation_type", "swish", ACTIVATIONS)
    _check_choice(options, "cnn_module_norm", "batch_norm", ("batch_norm", "layer_norm"))


def _check_choice(options: Mapping[str, Any], name: str, default: str, served: Any) -> None:
    value = options.get(name, default)
    if value not in served:
        raise _refuse(f"encoder_conf.{name}", value, " or ".join(sorted(served)))


def _refuse(name: str, value: object, served: object) -> CheckpointError:
    return CheckpointError(
        f"train.yaml: {name}={value!r} cannot be served in streaming; this backend serves "
        f"{name}={served!r}. Export a checkpoint trained that way."
    )
