"""Windows of icefall's front end give the features that its models were trained on.

The oracle is kaldi-native-fbank, which made the goldens' features too. Shapes: S samples, T frames
of a stream, W frames of a window, F bins.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import kaldi_native_fbank as knf
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.features import (
    ICEFALL_FBANK,
    IcefallFrontend,
    LogMelFilterbank,
    WindowGeometry,
)
from oasr_backend.features.samples import as_float32
from tests.audio_helpers import cut, noise
from tests.conftest import GOLDEN_DIR
from tests.reference.fbank import exact_features
from tests.reference.windows import mirrored

pytestmark = pytest.mark.numerics

FloatArray = npt.NDArray[np.float32]
Pieces = list[npt.NDArray[np.float32]] | list[npt.NDArray[np.int16]]
FRONTEND = IcefallFrontend()
GOLDENS = ["zip_ctc_small", "zip_rnnt_small", "zip_ctc_epoch"]
#: Of features whose samples are well above the floor.
TOLERANCE = 1e-3
PADDING = np.float32(math.log(1e-10))


def geometry_of(chunk: int) -> WindowGeometry:
    """Of a model with `chunk` frames of 20 ms."""
    padding = FRONTEND.padding
    assert padding is not None
    return WindowGeometry.of(
        FRONTEND.geometry,
        chunk_frames=chunk // 2,
        subsampling=4,
        right_context_frames=16,
        tail_frames=padding.tail_frames,
    )


class Streamed(NamedTuple):
    """Real frames of a stream, and those of its windows that stand for padding."""

    real_TF: FloatArray
    padding_TF: FloatArray


def streamed(pieces: Pieces, *, chunk: int = 16) -> Streamed:
    """What the windows of a stream that ends in padding hold, put together again."""
    geometry = geometry_of(chunk)
    windows = cut(geometry, pieces, tail_padding=True)
    if not windows:
        return Streamed(*np.empty((2, 0, 80), np.float32))
    rows_BS = torch.from_numpy(np.stack([row for row, _ in windows]))
    num_real_B = torch.tensor([frames.num_real for _, frames in windows])
    features_BWF = FRONTEND.pad(FRONTEND.features(rows_BS), num_real_B).numpy()
    own = geometry.stride_frames
    counts = list(zip(features_BWF, num_real_B.tolist(), strict=True))
    for (before_WF, _), (after_WF, num_real) in pairwise(counts):
        overlap = min(num_real, geometry.window_frames - own)
        np.testing.assert_allclose(before_WF[own:][:overlap], after_WF[:overlap], atol=TOLERANCE)
    return Streamed(
        np.concatenate([window_WF[: min(own, num_real)] for window_WF, num_real in counts]),
        np.concatenate([window_WF[num_real:] for window_WF, num_real in counts]),
    )


def kaldi_features(samples_S: FloatArray, *, high_freq: float = -400.0) -> FloatArray:
    options = knf.FbankOptions()
    options.frame_opts.samp_freq = 16000
    options.frame_opts.dither = 0.0
    options.frame_opts.snip_edges = False
    options.mel_opts.num_bins = 80
    options.mel_opts.high_freq = high_freq
    fbank = knf.OnlineFbank(options)
    fbank.accept_waveform(16000, samples_S.tolist())
    fbank.input_finished()
    frames = [fbank.get_frame(number) for number in range(fbank.num_frames_ready)]
    return np.stack(frames) if frames else np.empty((0, 80), np.float32)


def golden(name: str) -> tuple[npt.NDArray[np.int16], FloatArray]:
    """A recording and its features."""
    pcm16_S, rate = soundfile.read(GOLDEN_DIR / name / "audio.wav", dtype="int16")
    assert rate == 16000
    with np.load(GOLDEN_DIR / name / "expected.npz") as expected:
        return pcm16_S, expected["feats"]


def whole_signal(samples_S: FloatArray, num_frames: int) -> FloatArray:
    """A stream with its mirrored edges."""
    return mirrored(samples_S, -120, 280 + (num_frames - 1) * 160)


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("chunk", [8, 16, 32, 64])
def test_features_of_a_recording_are_the_goldens(name: str, chunk: int) -> None:
    """Where a bin is next to the floor, both are as near as float32 comes to the definition."""
    pcm16_S, feats_TF = golden(name)
    found_TF = streamed(np.array_split(pcm16_S, 23), chunk=chunk).real_TF
    assert found_TF.shape == feats_TF.shape
    error_TF = np.abs(found_TF - feats_TF)
    loud_TF = feats_TF > math.log(1e-6)
    assert error_TF[loud_TF].max() < TOLERANCE
    assert error_TF.mean() < 1e-5
    signal_S = whole_signal(as_float32(pcm16_S), len(feats_TF))
    exact = exact_features(signal_S, ICEFALL_FBANK)
    assert (np.abs(found_TF - exact.log_mel_TF.numpy()) <= exact.bound_TF.numpy()).all()


def test_every_length_to_two_thousand_samples_has_kaldis_features() -> None:
    signal_S = 0.1 * noise(2000, seed=5)
    geometry = geometry_of(8)
    first = []
    for num_samples in range(2001):
        windows = cut(geometry, [signal_S[:num_samples]], tail_padding=True)
        num_frames = (num_samples + 80) // 160
        assert len(windows) == (-(-(num_frames + 43) // 16) if num_frames else 0)
        assert sum(frames.num_real for _, frames in windows) == num_frames
        first += windows[:1]
    # All frames of these streams are in their first windows.
    rows_BS = torch.from_numpy(np.stack([row for row, _ in first]))
    features_BWF = FRONTEND.features(rows_BS).numpy()
    for num_samples, found_WF in zip(range(80, 2001), features_BWF, strict=True):
        expected_TF = kaldi_features(signal_S[:num_samples])
        assert len(expected_TF) == (num_samples + 80) // 160
        found_TF = found_WF[: len(expected_TF)]
        np.testing.assert_allclose(found_TF, expected_TF, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_samples", [0, 1, 79])
def test_less_than_half_a_shift_has_no_frame_here_or_in_kaldi(num_samples: int) -> None:
    samples_S = noise(num_samples)
    assert kaldi_features(samples_S).shape == streamed([samples_S]).real_TF.shape == (0, 80)


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 5000), max_size=6), chunk=st.sampled_from([8, 16, 32, 64]))
def test_any_cutting_of_a_stream_has_kaldis_features(sizes: list[int], chunk: int) -> None:
    samples_S = 0.1 * noise(sum(sizes), seed=6)
    found = streamed(np.split(samples_S, np.cumsum(sizes)), chunk=chunk)
    expected_TF = kaldi_features(samples_S)
    np.testing.assert_allclose(found.real_TF, expected_TF, atol=TOLERANCE, rtol=0)
    assert (found.padding_TF == PADDING).all()


def test_the_mel_range_ends_400_hz_below_the_nyquist_frequency() -> None:
    """Up to the Nyquist frequency the features are those of another training."""
    assert ICEFALL_FBANK.top_freq == 7600.0
    pcm16_S, feats_TF = golden("zip_ctc_epoch")
    signal_S = whole_signal(as_float32(pcm16_S), len(feats_TF))
    wrong = LogMelFilterbank(replace(ICEFALL_FBANK, high_freq=0.0))
    wrong_TF = wrong(torch.from_numpy(signal_S)[None])[0].numpy()
    assert np.abs(wrong_TF - feats_TF).mean() > 0.1
    assert np.abs(streamed([pcm16_S]).real_TF - feats_TF).mean() < 1e-5


def test_tail_frames_are_the_padding_and_silence_is_the_floor() -> None:
    found = streamed([np.zeros(16000, np.int16)])
    floor = math.log(np.finfo(np.float32).eps)
    np.testing.assert_allclose(found.real_TF, floor, atol=1e-5)
    assert found.real_TF.shape == (100, 80)
    # Of five windows the last three hold 36, 4 and none of the frames.
    assert len(found.padding_TF) == 3 * 45 - 36 - 4
    assert (found.padding_TF == PADDING).all()
    assert abs(PADDING + 23.02585) < 1e-5


def test_the_first_frame_hears_mirrored_samples() -> None:
    samples_S = 0.1 * noise(16000, seed=7)
    found_TF = streamed([samples_S]).real_TF
    np.testing.assert_allclose(found_TF[0], kaldi_features(samples_S)[0], atol=TOLERANCE)
    silent_S = np.concatenate([np.zeros(120, np.float32), samples_S])
    unmirrored_TF = FRONTEND.features(torch.from_numpy(silent_S)[None])[0].numpy()
    assert np.abs(unmirrored_TF[0] - found_TF[0]).max() > 0.1
    np.testing.assert_allclose(unmirrored_TF[1:90], found_TF[1:90], atol=TOLERANCE)


def test_samples_of_16_bits_and_floats_have_the_same_features() -> None:
    """Both are in [-1, 1]; 16-bit values as they are would be 20.79 louder in every bin."""
    pcm16_S, feats_TF = golden("zip_ctc_epoch")
    signal_S = as_float32(pcm16_S)
    half = pcm16_S.size // 2
    of_pcm16, of_float = streamed([pcm16_S]), streamed([signal_S])
    mixed = streamed([pcm16_S[:half], signal_S[half:]])
    for other in (of_float, mixed):
        assert np.array_equal(of_pcm16.real_TF, other.real_TF)
        assert np.array_equal(of_pcm16.padding_TF, other.padding_TF)
    assert np.abs(of_pcm16.real_TF - feats_TF).max() < 1.0


def test_the_front_end_says_what_a_stream_of_its_models_is() -> None:
    frames, padding = FRONTEND.geometry, FRONTEND.padding
    assert (frames.sample_rate, frames.frame_length_samples) == (16000, 400)
    assert (frames.frame_shift_samples, frames.num_bins, frames.snips_edges) == (160, 80, False)
    assert padding is not None
    assert (padding.value, padding.tail_frames) == (math.log(1e-10), 43)
    features_BWF = torch.randn(1, 45, 80)
    assert torch.equal(FRONTEND.normalise(features_BWF), features_BWF)
