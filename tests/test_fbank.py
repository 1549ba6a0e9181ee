"""Filterbank features equal Kaldi's, for every row of a batch."""

from __future__ import annotations

from pathlib import Path

import kaldi_native_fbank as knf
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch

from oasr_backend.errors import ConfigError, StreamStateError
from oasr_backend.features.fbank import FbankConfig, LogMelFilterbank, frame_window, mel_matrix

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


def exact_features(samples: npt.NDArray[np.float32], config: FbankConfig) -> torch.Tensor:
    """Kaldi's definition step by step in float64."""
    scaled = torch.from_numpy(samples).double() * config.audio_scale
    frames = scaled.unfold(0, config.frame_length_samples, config.frame_shift_samples)
    frames = frames - frames.mean(-1, keepdim=True)
    previous = torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
    frames = (frames - config.preemphasis * previous) * frame_window(config)
    power = torch.fft.rfft(frames, n=config.fft_size).abs()[:, :-1] ** 2
    mel = power @ mel_matrix(config)
    return mel.clamp(min=torch.finfo(torch.float32).eps).log()


@pytest.mark.parametrize("path", WAVS, ids=lambda path: path.stem)
def test_features_of_speech_equal_kaldi(path: Path) -> None:
    """Quiet bins beside loud ones are rounding noise in float32, in Kaldi (up to 0.011) as here."""
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == 16000
    features = LogMelFilterbank()(torch.from_numpy(samples)[None])[0]
    kaldi = kaldi_features(samples, FbankConfig())
    exact = exact_features(samples, FbankConfig())
    assert features.shape == kaldi.shape
    difference = (features - kaldi).abs()
    assert float(difference.max()) < 1e-2
    assert float(difference.mean()) < 1e-5
    assert int((difference > 1e-3).sum()) <= difference.numel() // 1000
    assert float((features - exact).abs().mean()) <= float((kaldi - exact).abs().mean())


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
    torch.testing.assert_close(features, kaldi_features(samples, config), atol=1e-3, rtol=0)


def test_a_row_of_a_batch_equals_the_row_alone() -> None:
    samples_BS = torch.randn(5, 4000, generator=torch.Generator().manual_seed(0)) * 0.1
    fbank = LogMelFilterbank()
    together = fbank(samples_BS)
    for row in range(5):
        torch.testing.assert_close(
            fbank(samples_BS[row : row + 1])[0], together[row], atol=1e-5, rtol=0
        )


def test_digital_silence_gives_the_floor_and_no_infinity() -> None:
    features = LogMelFilterbank()(torch.zeros(2, 1600))
    floor = np.log(np.float32(np.finfo(np.float32).eps))
    assert features.shape == (2, 8, 80)
    assert torch.equal(features, torch.full_like(features, float(floor)))


@pytest.mark.parametrize(("num_samples", "num_frames"), [(0, 0), (399, 0), (400, 1), (10960, 67)])
def test_frames_are_counted_without_padding(num_samples: int, num_frames: int) -> None:
    features = LogMelFilterbank()(torch.zeros(3, num_samples))
    assert features.shape == (3, num_frames, 80)
    assert features.dtype == torch.float32
    assert FbankConfig().num_frames(num_samples) == num_frames


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
        ({"snip_edges": False}, "snip_edges"),
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
        torch.testing.assert_close(features[row], alone, atol=1e-5, rtol=0)
    assert fbank(samples_BS[:0]).shape == (0, 67, 80)
