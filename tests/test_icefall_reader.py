"""icefall's checkpoints as they come: which file, which weights, which sizes, which tokens."""

from __future__ import annotations

import logging
import pathlib
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oasr_backend.checkpoints import Checkpoint, open_checkpoint
from oasr_backend.features import IcefallFrontend
from oasr_backend.models import ChunkSettings
from oasr_backend.models.transducer import JoinerHead
from oasr_backend.models.zipformer import ZipformerConfig, ZipformerEncoder, icefall_name
from oasr_backend.parity import decode_features
from tests.checkpoint_helpers import ctc_head, refusal
from tests.conftest import GOLDEN_DIR
from tests.icefall_helpers import (
    BOTH,
    CTC,
    EPOCH,
    State,
    copy_icefall,
    edit_arguments,
    edit_file,
    edit_state,
    read_file,
)
from tests.zipformer_goldens import zip_goldens
from tests.zipformer_helpers import golden_config

ALL = (CTC, BOTH, EPOCH)


def load(path: Path) -> Checkpoint:
    return open_checkpoint(path).load()


def encoder_config(checkpoint: Checkpoint) -> ZipformerConfig:
    encoder = checkpoint.model.encoder
    assert isinstance(encoder, ZipformerEncoder)
    return encoder.config


def assert_same(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    state, other = model.state_dict(), expected.state_dict()
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", [CTC, BOTH])
def test_the_shapes_are_the_architecture(name: str) -> None:
    assert encoder_config(load(GOLDEN_DIR / name)) == golden_config(name)


def test_every_tensor_of_the_file_is_served_or_of_training_alone() -> None:
    raw = read_file(GOLDEN_DIR / BOTH / "pretrained.pt")["model"]
    checkpoint = load(GOLDEN_DIR / BOTH)
    config = encoder_config(checkpoint)
    served: dict[str, Tensor] = {
        icefall_name(name, config): value
        for name, value in checkpoint.model.encoder.state_dict().items()
    }
    joiner = checkpoint.model.heads["joiner"]
    assert isinstance(joiner, JoinerHead)
    served |= joiner.transducer.state_dict()
    output = ctc_head(checkpoint.model).output
    served |= {f"ctc_output.1.{name}": value for name, value in output.state_dict().items()}
    assert served.keys() <= raw.keys()
    for name, value in served.items():
        assert torch.equal(value, raw[name]), name
    left = raw.keys() - served.keys()
    assert len(left) == 16 + 4
    assert all(re.search(r"^simple_.._proj|layers\.\d\.bypass_scale$", name) for name in left)


@pytest.mark.parametrize("name", ALL)
def test_what_is_known_at_once_is_what_loads(name: str) -> None:
    opened = open_checkpoint(GOLDEN_DIR / name)
    first, second = opened.load(), opened.load()
    chunks = ChunkSettings(chunk_size=16, num_left_chunks=8)
    assert opened.info.encoder.under(chunks) == first.model.encoder.set_chunks(chunks)
    assert opened.info.frames == first.model.frontend.geometry
    assert isinstance(first.model.frontend, IcefallFrontend)
    assert opened.info.vocab_size == first.tokenizer.vocab_size == 60
    assert list(opened.info.searches) == list(first.searches)
    assert_same(first.model, second.model)
    shared = {value.data_ptr() for value in first.model.parameters()}
    assert not shared & {value.data_ptr() for value in second.model.parameters()}


def test_the_transducer_comes_first_where_both_heads_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "oasr_backend"):
        both = load(GOLDEN_DIR / BOTH)
    assert next(iter(both.searches)) == "transducer_greedy"
    assert list(both.searches)[-2:] == ["greedy", "prefix_beam"]
    assert "heads=transducer,ctc default=transducer" in caplog.text
    assert list(load(GOLDEN_DIR / CTC).searches) == ["greedy", "prefix_beam"]


def test_a_transducer_alone_has_no_search_of_ctc(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path, BOTH)
    edit_state(directory, lambda s: [s.pop(f"ctc_output.1.{part}") for part in ("weight", "bias")])
    edit_arguments(directory, use_ctc=False)
    checkpoint = load(directory)
    assert all(name.startswith("transducer_") for name in checkpoint.searches)
    assert "ctc" not in checkpoint.model.heads


def as_type(dtype: torch.dtype) -> Callable[[State], object]:
    return lambda state: state.update({name: value.to(dtype) for name, value in state.items()})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_another_precision_are_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = copy_icefall(tmp_path)
    edit_state(directory, as_type(dtype))
    model, exact = load(directory).model, load(GOLDEN_DIR / CTC).model
    exact.load_state_dict({
        name: value.to(dtype).float() for name, value in exact.state_dict().items()
    })  # fmt: skip
    assert_same(model.encoder, exact.encoder)
    assert next(model.parameters()).dtype == torch.float32


def prefixed(content: State) -> None:
    content["model"] = {f"module.{name}": value for name, value in content["model"].items()}


def bare(content: State) -> None:
    content.update(content.pop("model"))


@pytest.mark.parametrize("change", [prefixed, bare])
def test_the_same_weights_may_be_wrapped_otherwise(
    tmp_path: Path, change: Callable[[State], object]
) -> None:
    directory = copy_icefall(tmp_path)
    edit_file(directory, change)
    assert_same(load(directory).model, load(GOLDEN_DIR / CTC).model)


def test_a_missing_tensor_is_named_as_the_file_would_name_it(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    edit_state(directory, lambda state: state.pop("encoder_embed.out.bias"))
    edit_file(directory, prefixed)
    refusal(directory, "no tensor 'module.encoder_embed.out.bias'")


def test_the_average_of_training_is_left_out_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "oasr_backend"):
        load(GOLDEN_DIR / EPOCH)
    (line,) = [text for text in caplog.messages if "event=icefall_state" in text]
    assert "served=model not_served=model_avg" in line


def only_average(directory: Path) -> None:
    edit_file(directory, lambda content: content.pop("model"))


@pytest.mark.parametrize(
    "choose",
    [lambda directory: edit_arguments(directory, use_averaged_model=1), only_average],
    ids=["asked for", "alone"],
)
def test_the_average_has_icefalls_log_probs(
    tmp_path: Path, choose: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_icefall(tmp_path, EPOCH)
    choose(directory)
    golden = zip_goldens()["zip_ctc_epoch-c16_l4"]
    expected = golden.arrays["avg.c16_l4.logp"]
    with caplog.at_level(logging.INFO, "oasr_backend"):
        (decoded,) = decode_features(
            directory, [golden.feats_TF], golden.config(decoder="greedy"), official_end=True
        )
    assert decoded.log_probs_TV is not None
    np.testing.assert_allclose(decoded.log_probs_TV, expected, atol=1e-4)
    assert "served=model_avg" in caplog.text


def test_paths_of_any_python_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copy_icefall(tmp_path, EPOCH)
    newer = types.ModuleType("pathlib._local")
    path_type = type("PosixPath", (pathlib.PurePosixPath,), {"__module__": "pathlib._local"})
    newer.PosixPath = path_type  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pathlib._local", newer)
    edit_file(
        directory,
        lambda content: content.update(
            exp_dir=path_type("exp"), lang_dir=pathlib.PureWindowsPath("data", "lang")
        ),
    )
    assert_same(load(directory).model, load(GOLDEN_DIR / EPOCH).model)


def test_nothing_but_a_load_may_read_paths(tmp_path: Path) -> None:
    load(GOLDEN_DIR / EPOCH)
    torch.save({"path": Path("x")}, tmp_path / "other.pt")
    with pytest.raises(Exception, match="PosixPath"):
        torch.load(tmp_path / "other.pt", weights_only=True)


def test_an_export_goes_before_files_of_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_icefall(tmp_path)
    for name in ("epoch-9.pt", "epoch-30.pt", "checkpoint-8000.pt"):
        (directory / name).write_bytes(b"not looked at")
    with caplog.at_level(logging.INFO, "oasr_backend"):
        load(directory)
    (line,) = [text for text in caplog.messages if "event=icefall_weights" in text]
    assert f"file={directory / 'pretrained.pt'}" in line
    assert "not_served=epoch-9.pt,epoch-30.pt,checkpoint-8000.pt" in line


def test_one_of_several_files_is_chosen_by_its_path(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path, EPOCH)
    shutil.copy(directory / "epoch-30.pt", directory / "epoch-29.pt")
    refusal(directory, "epoch-29.pt, epoch-30.pt and no pretrained.pt")
    opened = open_checkpoint(directory / "epoch-29.pt")
    assert opened.path == directory / "epoch-29.pt"
    assert_same(opened.load().model, load(GOLDEN_DIR / EPOCH).model)


def test_a_wenet_folder_with_such_files_stays_wenets(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN_DIR / "wenet_small", tmp_path / "checkpoint"))
    shutil.copy(GOLDEN_DIR / CTC / "tokens.txt", directory)
    shutil.copy(GOLDEN_DIR / CTC / "pretrained.pt", directory)
    assert open_checkpoint(directory).info.vocab_size == 96


def test_what_is_of_training_alone_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "oasr_backend"):
        load(GOLDEN_DIR / BOTH)
    (line,) = [text for text in caplog.messages if "event=tensors_ignored" in text]
    assert "unused_scales=16 (encoder.encoders.0.layers.0.bypass_scale)" in line
    assert "training_losses=4 (simple_am_proj.weight)" in line
