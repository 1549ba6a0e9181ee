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


def json_text_with_count(*, frame_num: int | None = 500, num_squares: int = 5) -> str:
    """Kaldi's layout: the count stands behind the sums."""
    stats = json.loads(json_text())
    stats["mean_stat"].append(len(FRAMES))
    stats["var_stat"] = [*stats["var_stat"], 0.0][:num_squares]
    stats["frame_num"] = frame_num
    return json.dumps({key: value for key, value in stats.items() if value is not None})


@pytest.mark.parametrize("num_bins", [None, 4])
@pytest.mark.parametrize(
    "text",
    [json_text(), "\ufeff" + json_text(), kaldi_text(), "global " + kaldi_text()],
    ids=["json", "json with a BOM", "kaldi", "kaldi with a key"],
)
def test_both_formats_normalise_to_zero_mean_and_unit_deviation(
    tmp_path: Path, text: str, num_bins: int | None
) -> None:
    check_normalises(load_cmvn(written(tmp_path, text), num_bins=num_bins))


@pytest.mark.parametrize("frame_num", [500, None])
@pytest.mark.parametrize("num_squares", [4, 5])
def test_a_count_of_frames_behind_the_sums_is_no_bin(
    tmp_path: Path, frame_num: int | None, num_squares: int
) -> None:
    text = json_text_with_count(frame_num=frame_num, num_squares=num_squares)
    check_normalises(load_cmvn(written(tmp_path, text), num_bins=4))


def check_normalises(cmvn: GlobalCmvn) -> None:
    assert cmvn.num_bins == 4
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


def test_a_bin_that_never_varies_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = FRAMES.copy()
    frames[:, 2] = 2.0
    path = written(tmp_path, json_text(frames))
    load_cmvn(path)
    (line,) = [text for text in caplog.messages if "event=cmvn_constant" in text]
    assert "bins [2]" in line
    assert str(path) in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["neither JSON nor Kaldi text"]),
        ("[ 1 2 3 ]", ["Kaldi text", "3 numbers"]),
        ("[ 1 x\n 3 4 ]", ["Kaldi text", "'x'"]),
        ("[1.0, 2.0]", ["Kaldi text", "'1.0,'"]),
        ('{"mean_stat": [1.0]}', ["lacks 'var_stat'", "found is 'mean_stat'"]),
        ('{"mean_stat:": [1.0], "var_stat": [2.0]}', ["lacks 'mean_stat'", "'mean_stat:'"]),
        ('{"mean_stat": [1.0], "var_stat": [2.0]}', ["lacks 'frame_num'"]),
        ('{"mean_stat": [1.0', ["Expecting"]),
        ('{"mean_stat": ["a"], "var_stat": [1.0], "frame_num": 1}', ["mean_stat", "'a'"]),
        ('{"mean_stat": [[1.0]], "var_stat": [1.0], "frame_num": 1}', ["shape (1, 1)"]),
        ('{"mean_stat": [1.0], "var_stat": [1.0, 2.0], "frame_num": 3}', ["1 bins", "of 2"]),
        ('{"mean_stat": [1.0], "var_stat": [1.0], "frame_num": 0}', ["counts 0 frames"]),
        ('{"mean_stat": [1.0], "var_stat": [1.0], "frame_num": -7}', ["counts -7 frames"]),
        ('{"mean_stat": [1.0], "var_stat": [1.0], "frame_num": NaN}', ["counts nan frames"]),
        ('{"mean_stat": [1.0], "var_stat": [1.0], "frame_num": [3]}', ["frame_num", "shape"]),
        ('{"mean_stat": [NaN], "var_stat": [1.0], "frame_num": 1}', ["bin 0", "non-finite"]),
        (
            '{"mean_stat": [0.0, 9.0], "var_stat": [1.0, 2.0], "frame_num": 3}',
            ["the variance of bin 1 is -8.33333"],
        ),
    ],
)
def test_a_broken_file_is_refused_by_what_is_wrong(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(CheckpointError) as caught:
        load_cmvn(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", [json_text(), kaldi_text()], ids=["json", "kaldi"])
@pytest.mark.parametrize("num_bins", [2, 5, 80])
def test_another_number_of_bins_is_refused_with_both_numbers(
    tmp_path: Path, text: str, num_bins: int
) -> None:
    with pytest.raises(CheckpointError, match=rf"of 4 bins .* have {num_bins}\b"):
        load_cmvn(written(tmp_path, text), num_bins=num_bins)


def test_two_counts_of_frames_that_differ_are_refused_with_both(tmp_path: Path) -> None:
    path = written(tmp_path, json_text_with_count(frame_num=499))
    with pytest.raises(
        CheckpointError, match=r"5 sums for 4 bins, and .* 500, is not the frame_num 499"
    ):
        load_cmvn(path, num_bins=4)


def test_a_binary_kaldi_matrix_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "global_cmvn"
    path.write_bytes(b"\0BDM \4\2\0\0\0\4\5\0\0\0" + bytes(80))
    with pytest.raises(CheckpointError, match="a binary Kaldi matrix; `copy-matrix"):
        load_cmvn(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_cmvn(tmp_path / "nowhere")


def test_values_are_copied() -> None:
    mean, istd = torch.zeros(2), torch.ones(2)
    cmvn = GlobalCmvn(mean, istd)
    mean.fill_(5.0)
    assert cmvn.mean.tolist() == [0.0, 0.0]
