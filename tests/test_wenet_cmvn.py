"""The choice of the normalisation where the file and the weights each hold one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.features import GlobalCmvn
from tests.checkpoint_helpers import (
    SOURCE,
    copy_golden,
    edit_config,
    edit_weights,
    kaldi,
    read_weights,
    refusal,
)


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return copy_golden(tmp_path)


def served_cmvn(directory: Path) -> GlobalCmvn | None:
    return kaldi(open_checkpoint(directory).load().model).cmvn


def set_cmvn(directory: Path, *, mean: torch.Tensor | None, istd: torch.Tensor | None) -> None:
    """Puts both parts into the weights; None leaves a part out."""
    values = {"mean": mean, "istd": istd}
    names = {f"encoder.global_cmvn.{part}": value for part, value in values.items()}

    def edit(weights: dict[str, Any]) -> None:
        for name, value in names.items():
            weights.pop(name)
            weights.update({} if value is None else {name: value})

    edit_weights(directory, edit)


def test_the_normalisation_of_the_weights_wins_over_a_file_that_differs(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = torch.linspace(1, 2, 80), torch.linspace(0.2, 0.4, 80)
    set_cmvn(directory, mean=trained[0], istd=trained[1])
    cmvn = served_cmvn(directory)
    assert cmvn is not None
    assert torch.equal(cmvn.mean, trained[0])
    assert torch.equal(cmvn.istd, trained[1])
    (line,) = [text for text in caplog.messages if "event=cmvn_differs" in text]
    assert str(directory / "global_cmvn") in line
    assert "encoder.global_cmvn" in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_that_says_the_same_to_the_last_digit_is_no_difference(
    directory: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    held = read_weights(directory)
    mean, istd = (held[f"encoder.global_cmvn.{part}"] for part in ("mean", "istd"))
    set_cmvn(directory, mean=mean.to(dtype), istd=istd.to(dtype))
    cmvn = served_cmvn(directory)
    assert cmvn is not None
    torch.testing.assert_close(cmvn.mean, mean, rtol=1e-5, atol=0)
    assert "event=cmvn_differs" not in caplog.text


def test_weights_without_a_normalisation_take_the_files(directory: Path) -> None:
    known = served_cmvn(directory)
    set_cmvn(directory, mean=None, istd=None)
    cmvn = served_cmvn(directory)
    assert cmvn is not None
    assert known is not None
    assert torch.equal(cmvn.mean, known.mean)


def test_a_normalisation_of_another_size_or_half_of_one_is_refused(directory: Path) -> None:
    set_cmvn(directory, mean=torch.zeros(40), istd=torch.ones(40))
    refusal(directory, "encoder.global_cmvn.mean is of shape (40,)", "80 bins")
    set_cmvn(directory, mean=torch.zeros(80), istd=None)
    refusal(directory, "no tensor 'encoder.global_cmvn.istd'")


def test_a_cmvn_file_of_another_size_is_refused_with_both_numbers(directory: Path) -> None:
    (directory / "global_cmvn").write_text(
        '{"mean_stat": [1.0, 2.0], "var_stat": [9.0, 9.0], "frame_num": 3}'
    )
    refusal(directory, str(directory / "global_cmvn"), "2 bins", "80")


def test_a_kaldi_file_without_a_count_is_told_that_it_lacks_it(directory: Path) -> None:
    path = directory / "global_cmvn"
    stats = json.loads(path.read_text())
    sums, squares = (" ".join(map(repr, stats[key])) for key in ("mean_stat", "var_stat"))
    path.write_text(f" [\n  {sums}\n  {squares} ]\n")
    refusal(directory, str(path), "rows have 80 numbers", "lack the count of frames")


def as_it_is(stats: dict[str, Any]) -> str:
    return json.dumps(stats)


def with_count(stats: dict[str, Any]) -> str:
    """81 numbers for 80 bins."""
    return json.dumps({**stats, "mean_stat": [*stats["mean_stat"], stats["frame_num"]]})


def as_kaldi_text(stats: dict[str, Any]) -> str:
    sums, squares = (" ".join(map(repr, stats[key])) for key in ("mean_stat", "var_stat"))
    return f" [\n  {sums} {stats['frame_num']}\n  {squares} 0 ]\n"


@pytest.mark.parametrize("is_json", [True, False])
@pytest.mark.parametrize("write", [as_it_is, with_count, as_kaldi_text])
def test_the_kind_of_a_cmvn_file_is_told_by_what_it_holds(
    directory: Path, write: Callable[[dict[str, Any]], str], is_json: bool
) -> None:
    path = directory / "global_cmvn"
    path.write_text(write(json.loads(path.read_text())))
    edit_config(directory, lambda config: config["cmvn_conf"].update(is_json_cmvn=is_json))
    cmvn, known = served_cmvn(directory), served_cmvn(SOURCE)
    assert cmvn is not None
    assert known is not None
    assert torch.equal(cmvn.mean, known.mean)
    assert torch.equal(cmvn.istd, known.istd)
