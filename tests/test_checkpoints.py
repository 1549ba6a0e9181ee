"""A WeNet directory as it is: what is read, and what is refused by name."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from oasr_backend.checkpoints import load_wenet
from oasr_backend.errors import CheckpointError
from oasr_backend.rescoring import NoDecoder
from tests.conftest import GOLDEN_DIR

SOURCE = GOLDEN_DIR / "wenet_small"
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "checkpoint"))


def edit_yaml(directory: Path, **encoder_options: Any) -> None:
    path = directory / "train.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["encoder_conf"].update(encoder_options)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


def edit_weights(directory: Path, edit: Edit) -> None:
    weights = torch.load(directory / "final.pt", weights_only=True)
    edit(weights)
    torch.save(weights, directory / "final.pt")


def test_a_golden_directory_loads_whole() -> None:
    checkpoint = load_wenet(SOURCE)
    assert checkpoint.model.vocab_size == 96 == checkpoint.tokenizer.vocab_size
    assert checkpoint.model.spec.model_dim == 64
    assert checkpoint.model.cmvn is not None


def test_an_attention_decoder_that_cannot_be_read_costs_rescoring_alone(directory: Path) -> None:
    assert load_wenet(directory).decoder == NoDecoder()
    edit_weights(directory, lambda w: w.update({"decoder.left_decoder.x": torch.ones(3)}))
    checkpoint = load_wenet(directory)
    assert checkpoint.model.vocab_size == 96
    assert isinstance(checkpoint.decoder, NoDecoder)
    assert "decoder.left_decoder.embed.0.weight" in checkpoint.decoder.reason


def test_weights_wrapped_in_a_training_checkpoint_load_too(directory: Path) -> None:
    weights = torch.load(directory / "final.pt", weights_only=True)
    torch.save({"model": weights, "epoch": 3}, directory / "final.pt")
    assert load_wenet(directory).model.vocab_size == 96


@pytest.mark.parametrize("name", ["train.yaml", "final.pt", "units.txt", "global_cmvn"])
def test_a_missing_file_is_named_with_what_a_directory_holds(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} does not exist; a WeNet checkpoint"):
        load_wenet(directory)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("causal", False),
        ("use_dynamic_chunk", False),
        ("pos_enc_layer_type", "abs_pos"),
        ("selfattention_layer_type", "selfattn"),
        ("normalize_before", False),
        ("concat_after", True),
        ("use_cnn_module", False),
        ("static_chunk_size", 16),
        ("input_layer", "linear"),
        ("activation_type", "snake"),
        ("cnn_module_norm", "group_norm"),
        ("positionwise_layer_type", "conv1d"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(
    directory: Path, option: str, value: Any
) -> None:
    edit_yaml(directory, **{option: value})
    with pytest.raises(CheckpointError) as caught:
        load_wenet(directory)
    assert f"{option}={value!r}" in str(caught.value)
    assert "this backend serves" in str(caught.value)


def test_an_unknown_option_is_refused_rather_than_ignored(directory: Path) -> None:
    edit_yaml(directory, secret_sauce=3)
    with pytest.raises(CheckpointError, match=r"encoder_conf.secret_sauce=3 is unknown"):
        load_wenet(directory)


def test_an_encoder_of_another_kind_is_refused(directory: Path) -> None:
    path = directory / "train.yaml"
    text = path.read_text(encoding="utf-8").replace("encoder: conformer", "encoder: transformer")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="encoder='transformer'"):
        load_wenet(directory)


def test_a_yaml_that_cannot_be_read_is_named(directory: Path) -> None:
    (directory / "train.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot read .*train.yaml"):
        load_wenet(directory)


def test_a_missing_weight_is_named(directory: Path) -> None:
    edit_weights(directory, lambda w: w.pop("encoder.encoders.1.self_attn.linear_q.weight"))
    with pytest.raises(CheckpointError, match=r"encoders.1.self_attn.linear_q"):
        load_wenet(directory)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "ctc.ctc_lo.weight",
        "encoder.embed.conv.0.bias",
        "encoder.encoders.1.self_attn.linear_k.bias",
        "encoder.encoders.0.conv_module.depthwise_conv.bias",
        "encoder.after_norm.weight",
    ],
)
def test_a_value_that_is_not_finite_is_refused_by_its_tensor(
    directory: Path, name: str, value: float
) -> None:
    edit_weights(directory, lambda w: w[name].view(-1)[3:5].fill_(value))
    with pytest.raises(CheckpointError, match=rf"2 of \d+ values of '{name}' are not finite"):
        load_wenet(directory)


def test_values_that_fold_to_no_number_are_refused_by_what_they_make(directory: Path) -> None:
    def give_batch_norm(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.endswith("conv_module.norm.weight")]:
            norm = name.removesuffix(".weight")
            weights[f"{norm}.running_mean"] = torch.zeros(64)
            weights[f"{norm}.running_var"] = torch.full((64,), -1.0 if ".1." in name else 1.0)

    edit_yaml(directory, cnn_module_norm="batch_norm")
    edit_weights(directory, give_batch_norm)
    with pytest.raises(CheckpointError, match=r"'layers.1.convolution.depthwise.* not finite"):
        load_wenet(directory)


def test_nonsense_in_a_tensor_that_nobody_reads_is_no_fault(directory: Path) -> None:
    edit_weights(directory, lambda w: w.update({"teacher.weight": torch.full((2,), math.nan)}))
    assert load_wenet(directory).model.vocab_size == 96


def test_weights_of_another_size_are_refused(directory: Path) -> None:
    edit_yaml(directory, linear_units=256)
    with pytest.raises(CheckpointError, match=r"does not match its train.yaml"):
        load_wenet(directory)


def test_a_file_that_holds_no_weights_is_refused(directory: Path) -> None:
    (directory / "final.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"cannot read .*final.pt .16 bytes.: it is damaged"):
        load_wenet(directory)


def test_a_vocabulary_shorter_than_the_head_is_refused(directory: Path) -> None:
    path = directory / "units.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:50]) + "\n", encoding="utf-8")
    with pytest.raises(CheckpointError):
        load_wenet(directory)
