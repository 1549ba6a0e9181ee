"""Filterbank features equal Kaldi's up to the roundings of both, for every row of a batch."""

from __future__ import annotations

import math
from pathlib import Path

import kaldi_native_fbank as knf
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch

from oasr_backend.errors import ConfigError, StreamStateError
from oasr_backend.features.fbank import FbankConfig, LogMelFilterbank
from tests.reference.fbank import exact_features
from tests.rounding import gamma

pytestmark = pytest.mark.numerics

DEMO_DIR = Path(__file__).parent.parent / "model_repository/oasr_streaming/demo_en"
WAVS = sorted((DEMO_DIR / "testset").glob("*.wav"))


def kaldi_features(samples: npt.NDArray[np.float32], config: FbankConfig) -> torch.Tensor:
    options = knf.FbankOptions()
    options.frame_opts.samp_freq = config.sample_rate
    options.frame_opts.dither = 0.0
    options.frame_opts.window_type = config.window
    options.frame_opts.preemph_coeff = config.preemphasis
    options.frame_opts.remove_dc_offset = config.remove_dc
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = config.num_mel_bins
    options.mel_opts.low_freq = config.low_freq
    options.mel_opts.high_freq = config.high_freq
    fbank = knf.OnlineFbank(options)
    fbank.accept_waveform(config.sample_rate, (samples * config.audio_scale).tolist())
    fbank.input_finished()
    return torch.from_numpy(np.stack([fbank.get_frame(i) for i in range(fbank.num_frames_ready)]))


def mel_error_of_kaldi(config: FbankConfig) -> float:
    """Kaldi makes a weight of four mel values in float32, each of a few roundings."""
    top, low = (1127.0 * math.log1p(hz / 700.0) for hz in (config.top_freq, config.low_freq))
    return 4 * gamma(4) * top / ((top - low) / (config.num_mel_bins + 1))


def assert_as_exact_as_float32(
    features_TF: torch.Tensor, samples: npt.NDArray[np.float32], config: FbankConfig
) -> None:
    """Ours and Kaldi's within their own errors of the definition, so of each other by the sum."""
    kaldi_TF = kaldi_features(samples, config)
    exact = exact_features(samples, config)
    looser = exact_features(samples, config, mel_error=mel_error_of_kaldi(config))
    assert features_TF.shape == kaldi_TF.shape == exact.log_mel_TF.shape
    assert within(features_TF, exact.log_mel_TF, exact.bound_TF)
    assert within(kaldi_TF, exact.log_mel_TF, looser.bound_TF)
    assert within(features_TF, kaldi_TF, exact.bound_TF + looser.bound_TF)
    assert float(exact.bound_TF.median()) < 1e-3, "quiet bins beside loud ones must be few"


def within(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> bool:
    return bool(((found.double() - expected.double()).abs() <= bound).all())


@pytest.mark.parametrize("path", WAVS, ids=lambda path: path.stem)
def test_features_of_speech_equal_kaldi(path: Path) -> None:
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == 16000
    features = LogMelFilterbank()(torch.from_numpy(samples)[None])[0]
    assert_as_exact_as_float32(features, samples, FbankConfig())


@pytest.mark.parametrize(
    "config",
    [
        FbankConfig(window="hamming", num_mel_bins=40, high_freq=-400.0),
        FbankConfig(window="hanning", remove_dc=False, low_freq=0.0, high_freq=7600.0),
        FbankConfig(window="rectangular", preemphasis=0.9, sample_rate=8000, num_mel_bins=23),
    ],
    ids=lambda config: config.window,
)
def test_other_options_equal_kaldi_too(config: FbankConfig) -> None:
    samples, _ = soundfile.read(DEMO_DIR / "testset/librivox_0870.wav", dtype="float32")
    samples = samples + np.float32(0.05)
    features = LogMelFilterbank(config)(torch.from_numpy(samples)[None])[0]
    assert_as_exact_as_float32(features, samples, config)


def test_a_row_of_a_batch_equals_the_row_alone() -> None:
    samples_BS = torch.randn(5, 4000, generator=torch.Generator().manual_seed(0)) * 0.1
    fbank = LogMelFilterbank()
    together = fbank(samples_BS)
    for row in range(5):
        bound_TF = exact_features(samples_BS[row].numpy(), fbank.config).bound_TF
        assert within(fbank(samples_BS[row : row + 1])[0], together[row], 2 * bound_TF)


def test_digital_silence_gives_the_floor_and_no_infinity() -> None:
    features = LogMelFilterbank()(torch.zeros(2, 1600))
    floor = np.log(np.float32(np.finfo(np.float32).eps))
    assert features.shape == (2, 8, 80)
    # Vector and scalar logarithms may differ in the last place.
    assert within(features, torch.full_like(features, float(floor)), 2 * gamma(2) * abs(floor))


@pytest.mark.parametrize(("num_samples", "num_frames"), [(0, 0), (399, 0), (400, 1), (10960, 67)])
def test_frames_are_counted_without_padding(num_samples: int, num_frames: int) -> None:
    features = LogMelFilterbank()(torch.zeros(3, num_samples))
    assert features.shape == (3, num_frames, 80)
    assert features.dtype == torch.float32
    assert FbankConfig().geometry.num_frames(num_samples) == num_frames


def test_mirrored_edges_change_where_frames_lie_and_not_what_they_are() -> None:
    mirrored = LogMelFilterbank(FbankConfig(snip_edges=False))
    assert not mirrored.config.geometry.snips_edges
    assert FbankConfig().geometry.snips_edges
    samples_BS = torch.randn(2, 1600, generator=torch.Generator().manual_seed(4))
    assert torch.equal(mirrored(samples_BS), LogMelFilterbank()(samples_BS))


def test_features_stay_float32_under_autocast_and_other_input_types() -> None:
    samples = torch.randn(2, 1600, generator=torch.Generator().manual_seed(1))
    fbank = LogMelFilterbank()
    expected = fbank(samples)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fbank(samples), expected)
    assert torch.equal(fbank(samples.double()), expected)


def test_the_input_is_left_alone() -> None:
    samples = torch.randn(2, 1600, generator=torch.Generator().manual_seed(1))
    before = samples.clone()
    LogMelFilterbank()(samples)
    assert torch.equal(samples, before)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dither": 1.0}, "dither"),
        ({"window": "kaiser"}, "kaiser"),
        ({"high_freq": 9000.0}, "9000"),
        ({"num_mel_bins": 1}, "num_mel_bins"),
        ({"frame_shift_ms": 0.0}, "0.0 ms"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(options: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        FbankConfig(**options)  # type: ignore[arg-type]


def test_samples_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(StreamStateError, match="shape"):
        LogMelFilterbank()(torch.zeros(400))
    with pytest.raises(StreamStateError, match="int16"):
        LogMelFilterbank()(torch.zeros(1, 400, dtype=torch.int16))


def test_a_batch_larger_than_a_tile_is_whole_and_in_order() -> None:
    samples_BS = torch.randn(37, 10960, generator=torch.Generator().manual_seed(2)) * 0.1
    fbank = LogMelFilterbank()
    features = fbank(samples_BS)
    assert features.shape == (37, 67, 80)
    for row in (0, 7, 8, 36):
        alone = fbank(samples_BS[row : row + 1])[0]
        bound_TF = exact_features(samples_BS[row].numpy(), fbank.config).bound_TF
        assert within(features[row], alone, 2 * bound_TF)
    assert fbank(samples_BS[:0]).shape == (0, 67, 80)
