"""Every icefall checkpoint that cannot be served is refused in one line that says why."""

from __future__ import annotations

import fractions
import os
from pathlib import Path
from typing import Any

import pytest

from oasr_backend.checkpoints import open_checkpoint
from tests.bad_icefall_cases import BAD
from tests.checkpoint_helpers import refusal
from tests.icefall_helpers import EPOCH, copy_icefall, edit_file, weights_of


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", BAD)
def test_it_is_refused_by_name_in_one_line(tmp_path: Path, case: str) -> None:
    bad = BAD[case]
    directory = copy_icefall(tmp_path, bad.golden)
    bad.spoil(directory)
    told = refusal(directory, *bad.told)
    assert "\n" not in told
    assert ";" in told, "a refusal ends with what to do"


class Program:
    """What a pickle would run."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._made),)


def test_a_program_in_the_file_is_named_and_does_not_run(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path, EPOCH)
    edit_file(directory, lambda content: content.update(sampler=Program(tmp_path / "ran")))
    refusal(directory, "epoch-30.pt pickles posix.mkdir", "is not run")
    assert not (tmp_path / "ran").exists()


def test_a_class_beside_the_paths_of_training_is_named(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path, EPOCH)
    edit_file(directory, lambda content: content.update(ratio=fractions.Fraction(1, 3)))
    refusal(directory, "pickles fractions.Fraction, which is no tensor")


def test_without_tokens_it_is_no_checkpoint_and_what_is_missing_is_told(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    (directory / "tokens.txt").unlink()
    told = "tokens.txt is missing beside pretrained.pt; copy it there"
    refusal(directory, f"{directory} is no whole checkpoint: {told}")
    refusal(directory / "pretrained.pt", told)
    weights_of(directory).rename(directory / "best-valid-loss.pt")
    refusal(directory, "tokens.txt is missing beside best-valid-loss.pt")


@pytest.mark.parametrize("name", ["pretrained.pt", "tokens.txt", "train_args.json", "bpe.model"])
def test_a_link_to_nothing_and_a_folder_are_called_that(tmp_path: Path, name: str) -> None:
    directory = copy_icefall(tmp_path)
    path = directory / name
    path.unlink(missing_ok=True)
    path.symlink_to("gone/file")
    refusal(directory, f"{path} is a link to gone/file, which is not there; an icefall checkpoint")
    path.unlink()
    path.mkdir()
    refusal(directory, f"{path} is a folder; an icefall checkpoint")


def test_a_dead_link_is_not_passed_over_for_a_file_of_training(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path, EPOCH)
    link = directory / "pretrained.pt"
    link.symlink_to("gone.pt")
    for path in (directory, link):
        refusal(path, f"{link} is a link to gone.pt, which is not there")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to("nowhere")
    refusal(elsewhere, f"{elsewhere} is a link to nowhere, which is not there; copy")


@pytest.mark.parametrize("name", ["tokens.txt", "train_args.json"])
def test_a_file_that_holds_no_weights_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    told = f"{name} is no file of weights; give the checkpoint's folder, or its file of weights"
    refusal(copy_icefall(tmp_path) / name, told)


@pytest.mark.parametrize("name", ["best-valid-loss.pt", "best-train-loss.pt", "iter-9.pt"])
def test_weights_of_another_name_are_picked_by_it(tmp_path: Path, name: str) -> None:
    directory = copy_icefall(tmp_path, EPOCH)
    path = weights_of(directory).rename(directory / name)
    refusal(directory, f"not served unasked: {name}; pick one by `--checkpoint {path}`")
    assert open_checkpoint(path).load().tokenizer.vocab_size


def test_a_train_yaml_beside_a_whole_icefall_checkpoint_is_passed_over(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    (directory / "train.yaml").write_text("a: 1\n")
    for path in (directory, directory / "pretrained.pt"):
        assert open_checkpoint(path).info.vocab_size == 60
    (directory / "tokens.txt").unlink()
    refusal(directory, "train.yaml: encoder=None cannot be served")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("encoder-epoch-99-avg-1.onnx", "an ONNX graph"),
        ("encoder_jit_trace-pnnx.ncnn.param", "an ncnn graph"),
        ("cpu_jit.pt", "a TorchScript archive"),
    ],
)
def test_a_folder_of_exports_is_called_that(tmp_path: Path, name: str, kind: str) -> None:
    directory = copy_icefall(tmp_path)
    weights_of(directory).rename(directory / name)
    refusal(directory, f"{name} is {kind}; give the PyTorch file it was made from")
