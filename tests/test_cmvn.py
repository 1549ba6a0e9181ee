"""Statistics files of both kinds give the same normalisation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from oasr_backend.errors import CheckpointError
from oasr_backend.features.cmvn import GlobalCmvn, load_cmvn
from tests.rounding import gamma

pytestmark = pytest.mark.numerics

DEMO_DIR = Path(__file__).parent.parent / "model_repository/oasr_streaming/demo_en"
#: Two float32 neighbours: both sides are rounded once, from float64.
EPS = torch.finfo(torch.float32).eps
FRAMES = np.random.default_rng(0).normal(10.0, 3.0, size=(500, 4))


def json_text(frames: npt.NDArray[np.float64] = FRAMES) -> str:
    stats = {
        "mean_stat": frames.sum(0).tolist(),
        "var_stat": (frames**2).sum(0).tolist(),
        "frame_num": len(frames),
    }
    return json.dumps(stats)


def kaldi_text(frames: npt.NDArray[np.float64] = FRAMES) -> str:
    sums = " ".join(map(repr, frames.sum(0).tolist()))
    squares = " ".join(map(repr, (frames**2).sum(0).tolist()))
    return f" [\n  {sums} {len(frames)} \n  {squares} 0 ]\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "global_cmvn"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("text", "is_json"), [(json_text(), True), (kaldi_text(), False)])
@pytest.mark.parametrize("detect", [False, True])
def test_both_formats_normalise_to_zero_mean_and_unit_deviation(
    tmp_path: Path, text: str, is_json: bool, detect: bool
) -> None:
    cmvn = load_cmvn(written(tmp_path, text), is_json=None if detect else is_json)
    normalised = cmvn(torch.from_numpy(FRAMES).float()[None])[0].double()
    # Frame, mean, difference and product are rounded; mean and deviation move no further.
    bound = gamma(5) * 2 * float(np.abs(FRAMES).max()) * float(cmvn.istd.max())
    assert float(normalised.mean(0).abs().max()) <= bound
    assert float((normalised.std(0, correction=0) - 1.0).abs().max()) <= bound


def test_the_statistics_of_the_demo_model_equal_those_in_its_checkpoint() -> None:
    cmvn = load_cmvn(DEMO_DIR / "global_cmvn")
    state = torch.load(DEMO_DIR / "final.pt", map_location="cpu", weights_only=True)
    assert cmvn.num_bins == 80
    torch.testing.assert_close(cmvn.mean, state["encoder.global_cmvn.mean"], rtol=EPS, atol=0)
    # The deviation is that of a difference, E(x^2) - mean^2, of statistics kept in float32.
    condition_F = 1.0 + 2.0 * (cmvn.mean * cmvn.istd).square()
    differences_F = (cmvn.istd / state["encoder.global_cmvn.istd"] - 1.0).abs()
    assert bool((differences_F <= EPS * condition_F).all())


def test_a_bin_that_never_varies_stays_finite(tmp_path: Path) -> None:
    cmvn = load_cmvn(written(tmp_path, json_text(np.full((10, 2), 2.0))))
    assert cmvn(torch.full((1, 1, 2), 2.0)).abs().max() == 0.0
    torch.testing.assert_close(cmvn.istd, torch.full((2,), 1e10))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "Kaldi text"),
        ("[ 1 2 3 ]", "Kaldi text"),
        ("[ 1 x\n 3 4 ]", "Kaldi text"),
        ('{"mean_stat": [1.0]}', "var_stat"),
        ('{"mean_stat": [1.0], "var_stat": [1.0, 2.0], "frame_num": 3}', "shape"),
        ('{"mean_stat": [1.0], "var_stat": [1.0], "frame_num": 0}', "0 frames"),
        ('{"mean_stat": [NaN], "var_stat": [1.0], "frame_num": 1}', "non-finite"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        load_cmvn(written(tmp_path, text))


def test_a_file_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is_json_cmvn"):
        load_cmvn(written(tmp_path, kaldi_text()), is_json=True)
    with pytest.raises(CheckpointError, match="is_json_cmvn"):
        load_cmvn(written(tmp_path, json_text()), is_json=False)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_cmvn(tmp_path / "nowhere")


def test_values_are_copied() -> None:
    mean, istd = torch.zeros(2), torch.ones(2)
    cmvn = GlobalCmvn(mean, istd)
    mean.fill_(5.0)
    assert cmvn.mean.tolist() == [0.0, 0.0]
