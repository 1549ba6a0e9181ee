"""What `train.yaml` of a WeNet checkpoint says, checked: every option is honoured or refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from oasr_backend.checkpoints.files import check_kind
from oasr_backend.errors import CheckpointError, ConfigError
from oasr_backend.features import MAX_RATE_HZ, MIN_RATE_HZ, FbankConfig
from oasr_backend.models.conformer import ACTIVATIONS, ConformerConfig
from oasr_backend.models.layers import SUBSAMPLING_KINDS

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
    "global_cmvn": None,
}
#: Values that WeNet assumes when such an option is not written down.
_WENET_DEFAULT: dict[str, Any] = {"causal": False}
_FREE = {
    "output_size", "attention_heads", "linear_units", "num_blocks", "input_layer",
    "activation_type", "macaron_style", "cnn_module_kernel", "cnn_module_norm", "norm_eps",
    "n_kv_head", "head_dim", "positionwise_conv_kernel_size", "static_chunk_size",
    "use_dynamic_chunk",
}  # fmt: skip
#: WeNet's features are Kaldi's, with the same defaults.
_USUAL = FbankConfig()
#: They matter to training only, or say which biases exist: `wenet_biases` reads those.
_IGNORED = {
    "dropout_rate", "positional_dropout_rate", "attention_dropout_rate", "gradient_checkpointing",
    "use_dynamic_left_chunk", "use_sdpa", "query_bias", "key_bias", "value_bias", "conv_bias",
}  # fmt: skip
#: Options of dataset_conf that say what a feature frame is. Dither is a training device: it is not
#: applied.
_RESAMPLE_OPTIONS = {"resample_rate"}
_FBANK_OPTIONS = {"num_mel_bins", "frame_length", "frame_shift", "dither", "window_type"}
#: Speech changes many times a second, and one window must not take minutes to compute.
_MAX_FRAME_MS = 1000
#: What WeNet's first releases had in their place, of which only the usual values are served.
_OLD_FEATURES = "collate_conf.feature_extraction_conf"
_OLD_ONLY = {"feature_type": "fbank", "frame_length": 25, "frame_shift": 10, "using_pitch": False}


def read_train_yaml(path: Path) -> dict[str, Any]:
    check_kind(path)
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    # Dates that are none are a ValueError to the reader, too deep a nesting a RecursionError.
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
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
    options = section(config, "encoder_conf")
    _check_options(options)

    def size(name: str, default: int) -> int:
        value = options.get(name)
        return _whole_number(f"encoder_conf.{name}", default if value is None else value)

    model_dim, num_heads = size("output_size", 256), size("attention_heads", 4)
    return ConformerConfig(
        num_mel_bins=_num_mel_bins(config),
        model_dim=model_dim,
        num_layers=size("num_blocks", 6),
        num_heads=num_heads,
        num_kv_heads=size("n_kv_head", num_heads),
        head_dim=size("head_dim", model_dim // num_heads),
        feed_forward_dim=size("linear_units", 2048),
        conv_kernel_size=size("cnn_module_kernel", 15),
        subsampling=str(options.get("input_layer", "conv2d")),
        activation=str(options.get("activation_type", "swish")),
        macaron=bool(options.get("macaron_style", True)),
        conv_layer_norm=options.get("cnn_module_norm", "batch_norm") == "layer_norm",
        norm_eps=_positive("encoder_conf.norm_eps", options.get("norm_eps", 1e-5)),
        chunk_sizes=_chunk_sizes(options),
    )


def _chunk_sizes(options: Mapping[str, Any]) -> tuple[int, ...]:
    """Chunk sizes that the encoder was trained with: any after dynamic training, else the one.

    Raises CheckpointError for training on whole utterances, or on both at once.
    """
    static, dynamic = options.get("static_chunk_size", 0), options.get("use_dynamic_chunk", False)
    if dynamic is True and static == 0:
        return ()
    if dynamic is True:
        raise _refuse("encoder_conf.static_chunk_size", static, "0 beside use_dynamic_chunk=True")
    if dynamic is not False or static in (0, None):
        raise _refuse("encoder_conf.use_dynamic_chunk", dynamic, "True, or a static_chunk_size")
    return (_whole_number("encoder_conf.static_chunk_size", static),)


def fbank_config(config: Mapping[str, Any]) -> FbankConfig:
    """The feature frames of `dataset_conf`, whose sample rate is the model's.

    Raises CheckpointError naming the first option that cannot be honoured.
    """
    _check_features(config)
    resample = section(config, "dataset_conf.resample_conf")
    fbank = section(config, "dataset_conf.fbank_conf")
    _check_known("dataset_conf.resample_conf", resample, _RESAMPLE_OPTIONS)
    _check_known("dataset_conf.fbank_conf", fbank, _FBANK_OPTIONS)
    sample_rate = _sample_rate(resample.get("resample_rate", _USUAL.sample_rate))
    num_mel_bins = _num_mel_bins(config)
    length_ms, shift_ms = _frame_times(fbank)
    _check_dither(fbank.get("dither", 0.0))
    try:
        return FbankConfig(
            sample_rate=sample_rate,
            num_mel_bins=num_mel_bins,
            frame_length_ms=length_ms,
            frame_shift_ms=shift_ms,
            window=str(fbank.get("window_type", _USUAL.window)),
        )
    except ConfigError as error:
        raise CheckpointError(f"train.yaml: dataset_conf.fbank_conf: {error}") from error


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The options under a dotted name; none where it is not written down.

    Raises CheckpointError for anything but a mapping.
    """
    found = config
    for part in name.split("."):
        inner = found.get(part) or {}
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"train.yaml: {part} is {inner!r}; it must hold options by name")
        found = inner
    return found


def _whole_number(name: str, value: object) -> int:
    """Raises CheckpointError for anything but an integer of 1 or more."""
    number = _number(value)
    if not (number >= 1 and number % 1 == 0):
        raise CheckpointError(f"train.yaml: {name}={value!r} is no whole number of 1 or more")
    return int(number)


def _positive(name: str, value: object) -> float:
    number = _number(value)
    if not 0.0 < number < math.inf:
        raise CheckpointError(f"train.yaml: {name}={value!r} is no positive number; give one")
    return number


def _number(value: object) -> float:
    """YAML reads 1e-5 as text. NaN for what is no number."""
    try:
        return float(str(value))
    except ValueError:
        return math.nan


def _check_features(config: Mapping[str, Any]) -> None:
    dataset, old = section(config, "dataset_conf"), section(config, _OLD_FEATURES)
    others = {"mfcc_conf", "log_mel_spectrogram_conf"} & set(dataset)
    if "fbank_conf" not in dataset and others:
        raise _refuse("dataset_conf", "features other than fbank", "fbank_conf")
    if dataset.get("feats_type", "fbank") != "fbank":
        raise _refuse("dataset_conf.feats_type", dataset["feats_type"], "fbank")
    for name, served in _OLD_ONLY.items():
        if old.get(name, served) != served:
            raise _refuse(f"{_OLD_FEATURES}.{name}", old[name], served)


def _sample_rate(value: object) -> int:
    name = "dataset_conf.resample_conf.resample_rate"
    rate = _whole_number(name, value)
    if not MIN_RATE_HZ <= rate <= MAX_RATE_HZ:
        raise _refuse(name, value, f"{MIN_RATE_HZ} .. {MAX_RATE_HZ}")
    return rate


def _frame_times(fbank: Mapping[str, Any]) -> tuple[float, float]:
    """Length and shift in ms."""
    length_ms, shift_ms = (
        _positive(f"dataset_conf.fbank_conf.{name}", fbank.get(name, default))
        for name, default in (
            ("frame_length", _USUAL.frame_length_ms),
            ("frame_shift", _USUAL.frame_shift_ms),
        )
    )
    if length_ms > _MAX_FRAME_MS:
        served = f"{_MAX_FRAME_MS} or less"
        raise _refuse("dataset_conf.fbank_conf.frame_length", fbank["frame_length"], served)
    if shift_ms > length_ms:
        # Samples between two frames would be heard by none.
        served = f"{length_ms:g} or less, the frame_length"
        raise _refuse("dataset_conf.fbank_conf.frame_shift", shift_ms, served)
    return length_ms, shift_ms


def _check_dither(value: object) -> None:
    """It is not applied, but what is none says that the file is damaged."""
    if not 0.0 <= _number(value) < math.inf:
        name = "dataset_conf.fbank_conf.dither"
        raise CheckpointError(f"train.yaml: {name}={value!r} is no number of 0 or more; give one")


def _num_mel_bins(config: Mapping[str, Any]) -> int:
    stated = section(config, "dataset_conf.fbank_conf").get("num_mel_bins")
    width = config.get("input_dim")
    found = [value for value in (width, stated) if value is not None]
    sizes = [_whole_number("dataset_conf.fbank_conf.num_mel_bins", value) for value in found]
    if len(set(sizes)) > 1:
        raise CheckpointError(
            f"train.yaml: input_dim={width!r}, but dataset_conf.fbank_conf.num_mel_bins={stated!r};"
            " this backend serves encoders that read the filterbank's bins, so both must be equal"
        )
    return sizes[0] if sizes else _USUAL.num_mel_bins


def _check_known(name: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    for option in sorted(set(options) - set(known), key=str):
        raise CheckpointError(
            f"train.yaml: {name}.{option}={options[option]!r} is unknown to this backend, which "
            f"knows {', '.join(sorted(known))}; remove it if it does not change the features"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(_ONLY) - _FREE - _IGNORED, key=str)
    if unknown:
        raise CheckpointError(
            f"train.yaml: encoder_conf.{unknown[0]}={options[unknown[0]]!r} is unknown to this "
            "backend; remove it if it does not change inference"
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
    if value not in list(served):
        raise _refuse(f"encoder_conf.{name}", value, " or ".join(sorted(served)))


def _refuse(name: str, value: object, served: object) -> CheckpointError:
    return CheckpointError(
        f"train.yaml: {name}={value!r} cannot be served in streaming; this backend serves "
        f"{name}={served!r}. Export a checkpoint trained that way."
    )
