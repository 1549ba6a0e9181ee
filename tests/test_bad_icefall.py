"""Every icefall checkpoint that cannot be served is refused in one line that says why."""

from __future__ import annotations

import fractions
import os
from pathlib import Path
from typing import Any

import pytest

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
    told = refusal(directory, "it holds pretrained.pt, train_args.json. ")
    assert (
        "An icefall checkpoint holds pretrained.pt (or one epoch-*.pt or checkpoint-*.pt)," in told
    )
    assert "tokens.txt" in told


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
