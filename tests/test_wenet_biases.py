"""Every bias of a WeNet file is required, but those that `train.yaml` leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.decoders.second_pass.base import NoDecoder
from oasr_backend.models.rescoring import RescoringDecoder
from oasr_backend.parity import stream_log_probs
from tests.checkpoint_helpers import (
    copy_golden,
    edit_config,
    edit_weights,
    edit_yaml,
    read_weights,
    refusal,
    write_weights,
)
from tests.decoder_checkpoint import write_checkpoint

ENCODER_OPTIONS = [
    ("query_bias", ("linear_q", "linear_out")),
    ("key_bias", ("linear_k",)),
    ("value_bias", ("linear_v",)),
    ("conv_bias", ("pointwise_conv1", "depthwise_conv", "pointwise_conv2")),
]


def biases_of(weights: dict[str, Any], *layers: str, start: str = "encoder.") -> list[str]:
    """Names of the biases below `start`, or of those of some layers alone."""
    names = [name for name in weights if name.startswith(start) and name.endswith(".bias")]
    return [name for name in names if not layers or name.split(".")[-2] in layers]


@pytest.mark.parametrize("golden", ["wenet_small", "wenet_bn_k31"])
def test_each_bias_that_is_missing_is_named(tmp_path: Path, golden: str) -> None:
    directory = copy_golden(tmp_path, golden)
    weights = read_weights(directory)
    names = ["ctc.ctc_lo.bias", *biases_of(weights)]
    assert len(names) > 30
    for name in names:
        write_weights(directory, {key: it for key, it in weights.items() if key != name})
        refusal(directory, f"has no tensor {name!r}", "train.yaml")


@pytest.mark.parametrize(("option", "layers"), ENCODER_OPTIONS)
def test_a_bias_that_train_yaml_leaves_out_is_zero(
    tmp_path: Path, option: str, layers: tuple[str, ...]
) -> None:
    directory = copy_golden(tmp_path)
    names = biases_of(read_weights(directory), *layers)
    assert len(names) == 3 * len(layers)
    edit_weights(directory, lambda w: [w[name].zero_() for name in names])
    feats_TF = np.random.default_rng(0).normal(10.0, 3.0, (80, 80)).astype(np.float32)
    expected_TV = stream_log_probs(directory, feats_TF, chunk_size=8, num_left_chunks=2)
    edit_weights(directory, lambda w: [w.pop(name) for name in names])
    refusal(directory, f"has no tensor {names[0]!r}")
    edit_yaml(directory, **{option: False})
    served_TV = stream_log_probs(directory, feats_TF, chunk_size=8, num_left_chunks=2)
    np.testing.assert_array_equal(served_TV, expected_TV)


@pytest.mark.parametrize("option", ["query_bias", "key_bias", "value_bias", "conv_bias"])
def test_an_option_excuses_no_bias_of_a_norm(tmp_path: Path, option: str) -> None:
    directory = copy_golden(tmp_path)
    edit_yaml(directory, **{option: False})
    edit_weights(directory, lambda w: w.pop("encoder.encoders.1.norm_mha.bias"))
    refusal(directory, "has no tensor 'encoder.encoders.1.norm_mha.bias'")


def test_a_bias_that_is_missing_from_the_attention_decoder_costs_rescoring(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint")
    names = biases_of(read_weights(directory), "linear_k", start="decoder.")
    assert len(names) == 6
    edit_weights(directory, lambda w: [w.pop(name) for name in names])
    # The encoder's options say nothing of the decoder.
    edit_yaml(directory, key_bias=False)
    decoder = open_checkpoint(directory).load().second_pass
    assert isinstance(decoder, NoDecoder)
    assert f"has no tensor {names[0]!r}" in decoder.reason
    edit_config(directory, lambda config: config["decoder_conf"].update(key_bias=False))
    assert isinstance(open_checkpoint(directory).load().second_pass, RescoringDecoder)
