"""A WeNet directory as it is: what is read, and what is refused by name."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.decoders.second_pass.base import NoDecoder
from oasr_backend.errors import CheckpointError
from tests.checkpoint_helpers import (
    SOURCE,
    copy_golden,
    ctc_head,
    edit_config,
    edit_weights,
    edit_yaml,
    kaldi,
    refusal,
)
from tests.decoder_checkpoint import write_checkpoint


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return copy_golden(tmp_path)


def test_a_golden_directory_loads_whole() -> None:
    checkpoint = open_checkpoint(SOURCE).load()
    assert ctc_head(checkpoint.model).vocab_size == 96 == checkpoint.tokenizer.vocab_size
    assert checkpoint.model.spec.model_dim == 64
    assert kaldi(checkpoint.model).cmvn is not None


def test_an_attention_decoder_that_cannot_be_read_costs_rescoring_alone(directory: Path) -> None:
    assert open_checkpoint(directory).load().second_pass == NoDecoder()
    edit_weights(directory, lambda w: w.update({"decoder.left_decoder.x": torch.ones(3)}))
    checkpoint = open_checkpoint(directory).load()
    assert ctc_head(checkpoint.model).vocab_size == 96
    assert isinstance(checkpoint.second_pass, NoDecoder)
    assert "decoder.left_decoder.embed.0.weight" in checkpoint.second_pass.reason


@pytest.mark.parametrize("name", ["final.pt", "units.txt", "global_cmvn"])
def test_a_missing_file_is_named_with_what_a_directory_holds(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} does not exist; a WeNet checkpoint"):
        open_checkpoint(directory).load()


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
        open_checkpoint(directory).load()
    assert f"{option}={value!r}" in str(caught.value)
    assert "this backend serves" in str(caught.value)


def test_an_unknown_option_is_refused_rather_than_ignored(directory: Path) -> None:
    edit_yaml(directory, secret_sauce=3)
    with pytest.raises(CheckpointError, match=r"encoder_conf.secret_sauce=3 is unknown"):
        open_checkpoint(directory).load()


def test_an_encoder_of_another_kind_is_refused(directory: Path) -> None:
    path = directory / "train.yaml"
    text = path.read_text(encoding="utf-8").replace("encoder: conformer", "encoder: transformer")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="encoder='transformer'"):
        open_checkpoint(directory).load()


def test_a_yaml_that_cannot_be_read_is_named(directory: Path) -> None:
    (directory / "train.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot read .*train.yaml"):
        open_checkpoint(directory).load()


def test_a_missing_weight_is_named(directory: Path) -> None:
    edit_weights(directory, lambda w: w.pop("encoder.encoders.1.self_attn.linear_q.weight"))
    with pytest.raises(CheckpointError, match=r"encoders.1.self_attn.linear_q"):
        open_checkpoint(directory).load()


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
        open_checkpoint(directory).load()


def test_values_that_fold_to_no_number_are_refused_by_what_they_make(directory: Path) -> None:
    def give_batch_norm(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.endswith("conv_module.norm.weight")]:
            norm = name.removesuffix(".weight")
            weights[f"{norm}.running_mean"] = torch.zeros(64)
            weights[f"{norm}.running_var"] = torch.full((64,), -1.0 if ".1." in name else 1.0)

    edit_yaml(directory, cnn_module_norm="batch_norm")
    edit_weights(directory, give_batch_norm)
    with pytest.raises(CheckpointError, match=r"'layers.1.convolution.depthwise.* not finite"):
        open_checkpoint(directory).load()


def test_nonsense_in_a_tensor_that_nobody_reads_is_no_fault(directory: Path) -> None:
    nonsense = {"context_module.norm.weight": torch.full((2,), math.nan)}
    edit_weights(directory, lambda w: w.update(nonsense))
    assert open_checkpoint(directory).load().tokenizer.vocab_size == 96


def test_weights_of_another_size_are_refused(directory: Path) -> None:
    edit_yaml(directory, linear_units=256)
    # Of many tensors it is the first in the model's order, in every run.
    first = "layers.0.macaron.expand.weight is of shape (128, 64), not (256, 64)"
    refusal(directory, "does not match its train.yaml", first)


def test_fewer_blocks_than_were_trained_are_refused_by_the_first_that_is_left(
    directory: Path,
) -> None:
    edit_yaml(directory, num_blocks=2)
    refusal(directory, str(directory / "final.pt"), "'encoder.encoders.2.", "would be unused")


def test_weights_of_a_block_that_train_yaml_leaves_out_are_refused(directory: Path) -> None:
    edit_yaml(directory, macaron_style=False)
    refusal(directory, "feed_forward_macaron", "would be unused", "one training")


def test_statistics_of_a_norm_that_train_yaml_does_not_have_are_refused(tmp_path: Path) -> None:
    directory = copy_golden(tmp_path, "wenet_bn_k31")
    edit_yaml(directory, cnn_module_norm="layer_norm")
    refusal(directory, "conv_module.norm.running_mean", "would be unused")


@pytest.mark.parametrize(
    "name",
    [
        "encoder.encoders.0.self_attn.linear_q.lora_A",
        "encoder.embed.conv.4.weight",
        "encoder.extra_norm.weight",
        "teacher.weight",
    ],
)
def test_a_tensor_without_a_use_is_refused_by_name(directory: Path, name: str) -> None:
    edit_weights(directory, lambda w: w.update({name: torch.ones(2)}))
    message = refusal(directory, repr(name), "would be unused")
    assert " more" not in message


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("position_tables", "encoder.embed.pos_enc.pe"),
        ("training_counters", "encoder.encoders.0.conv_module.norm.num_batches_tracked"),
        ("concat_after", "encoder.encoders.0.concat_linear.weight"),
        ("context_biasing", "context_module.biasing_layer.linear_q.weight"),
        ("transducer", "joint.ffn_out.weight"),
    ],
)
def test_what_changes_no_result_is_ignored_in_one_line_of_the_log(
    directory: Path, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit_weights(directory, lambda w: w.update({name: torch.ones(2, dtype=torch.int64)}))
    with caplog.at_level(logging.INFO, "oasr_backend"):
        open_checkpoint(directory).load()
    (line,) = [text for text in caplog.messages if "event=tensors_ignored" in text]
    assert f"{kind}=1 ({name})" in line
    assert str(directory / "final.pt") in line


def test_a_decoder_that_leaves_trained_tensors_unused_costs_rescoring_alone(
    tmp_path: Path,
) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", num_blocks=1)
    decoder = open_checkpoint(directory).load().second_pass
    assert isinstance(decoder, NoDecoder)
    assert "'decoder.left_decoder.decoders.1." in decoder.reason
    assert "would be unused" in decoder.reason


def test_a_direction_without_a_say_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint")
    edit_config(directory, lambda config: config["model_conf"].update(reverse_weight=0.0))
    with caplog.at_level(logging.INFO, "oasr_backend"):
        assert not isinstance(open_checkpoint(directory).load().second_pass, NoDecoder)
    assert "(decoder.right_decoder." in caplog.text


@pytest.mark.parametrize(("option", "value"), [("num_blocks", 0), ("output_size", "wide")])
def test_a_size_that_is_no_size_is_refused_by_name(
    directory: Path, option: str, value: Any
) -> None:
    edit_yaml(directory, **{option: value})
    refusal(directory, f"encoder_conf.{option}={value!r} is no whole number")
