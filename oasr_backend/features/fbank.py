"""Log-mel filterbank features as Kaldi computes them, for a whole batch of windows at once.

Shapes: B streams, S samples, T frames, N samples of one frame, K FFT bins, F mel bins.
The definitions (frame cutting, pre-emphasis, Povey window, mel scale 1127 ln(1 + f/700), floor at
the float32 epsilon) are those of Kaldi's feature-window, mel-computations and feature-fbank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from oasr_backend.errors import ConfigError, StreamStateError
from oasr_backend.features.geometry import FrameGeometry
from oasr_backend.kernels.launch import use_kernel

_WINDOWS = ("povey", "hanning", "hamming", "rectangular")
# About 8 windows: their frames stay in a core's cache, a large batch's would not.
_CPU_TILE_SAMPLES = 96_000
_LOG_FLOOR = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class FbankConfig:
    """Kaldi's fbank options. Samples in [-1, 1] are multiplied by `audio_scale` first."""

    sample_rate: int = 16000
    num_mel_bins: int = 80
    frame_length_ms: float = 25.0
    frame_shift_ms: float = 10.0
    low_freq: float = 20.0
    #: Zero or less is an offset from the Nyquist frequency.
    high_freq: float = 0.0
    preemphasis: float = 0.97
    remove_dc: bool = True
    window: str = "povey"
    #: False: the frames are those of a stream that `AudioBuffer` mirrors at its ends.
    snip_edges: bool = True
    dither: float = 0.0
    audio_scale: float = 32768.0

    def __post_init__(self) -> None:
        """Refuses with ConfigError what a streaming server cannot honour."""
        if self.dither != 0.0:
            raise ConfigError(f"dither is {self.dither}; only 0 is repeatable, set dither to 0")
        if self.window not in _WINDOWS:
            raise ConfigError(f"window {self.window!r} is unknown; use one of {_WINDOWS}")
        if self.frame_shift_samples < 1 or self.frame_length_samples < 2:
            raise ConfigError(
                f"frames of {self.frame_length_ms} ms every {self.frame_shift_ms} ms at "
                f"{self.sample_rate} Hz are shorter than a sample; use 25 ms every 10 ms"
            )
        if self.num_mel_bins < 3:
            raise ConfigError(f"num_mel_bins is {self.num_mel_bins}, below 3; use 80")
        if not 0.0 <= self.low_freq < self.top_freq <= self.sample_rate / 2:
            raise ConfigError(
                f"mel range {self.low_freq}..{self.top_freq} Hz does not lie within "
                f"0..{self.sample_rate / 2} Hz; change low_freq or high_freq"
            )

    @property
    def frame_length_samples(self) -> int:
        return int(self.sample_rate * 0.001 * self.frame_length_ms)

    @property
    def frame_shift_samples(self) -> int:
        return int(self.sample_rate * 0.001 * self.frame_shift_ms)

    @property
    def fft_size(self) -> int:
        return 1 << (self.frame_length_samples - 1).bit_length()

    @property
    def top_freq(self) -> float:
        return self.high_freq if self.high_freq > 0.0 else self.sample_rate / 2 + self.high_freq

    @cached_property
    def geometry(self) -> FrameGeometry:
        return FrameGeometry(
            sample_rate=self.sample_rate,
            frame_length_samples=self.frame_length_samples,
            frame_shift_samples=self.frame_shift_samples,
            num_bins=self.num_mel_bins,
            snips_edges=self.snip_edges,
        )


class LogMelFilterbank(nn.Module):
    """Samples in [-1, 1] to log-mel energies, in float32 under any default dtype.

    Has no state between calls and no data-dependent shape, so that it can be captured in a
    CUDA graph (after one warm-up call, which makes the FFT plan). On a GPU the mel product
    follows the TF32 setting of the process, which PyTorch leaves off.
    """

    window: Tensor
    mel: Tensor

    def __init__(self, config: FbankConfig | None = None) -> None:
        super().__init__()
        self.config = config or FbankConfig()
        # The scale rides on the window for free.
        window_N = frame_window(self.config) * self.config.audio_scale
        self.register_buffer("window", window_N.float(), persistent=False)
        self.register_buffer("mel", mel_matrix(self.config).float(), persistent=False)

    @torch.no_grad()
    def forward(self, samples_BS: Tensor) -> Tensor:
        """Returns `features_BTF` with T = config.geometry.num_frames(S); T may be 0."""
        if samples_BS.dim() != 2 or not samples_BS.is_floating_point():
            raise StreamStateError(
                f"samples are {samples_BS.dtype} of shape {tuple(samples_BS.shape)}; "
                "pass floating point samples of shape (streams, samples)"
            )
        num_streams, num_samples = samples_BS.shape
        num_frames = self.config.geometry.num_frames(num_samples)
        if num_streams == 0 or num_frames == 0:
            return self.mel.new_zeros((num_streams, num_frames, self.config.num_mel_bins))
        with torch.autocast(samples_BS.device.type, enabled=False):
            if samples_BS.device.type != "cpu":
                return self._features(samples_BS.float())
            tile_streams = max(1, _CPU_TILE_SAMPLES // num_samples)
            tiles = torch.split(samples_BS.float(), tile_streams)
            return torch.cat([self._features(tile_BS) for tile_BS in tiles])

    def _features(self, samples_BS: Tensor) -> Tensor:
        spectrum_BTK = torch.fft.rfft(self._frames(samples_BS))
        # Real and imaginary parts apart: abs() and a sum over pairs are ten times slower.
        real_BTK, imag_BTK = spectrum_BTK.real[..., :-1], spectrum_BTK.imag[..., :-1]
        power_BTK = real_BTK.square().addcmul_(imag_BTK, imag_BTK)
        energy_BTF = torch.matmul(power_BTK, self.mel)
        return energy_BTF.clamp_(min=_LOG_FLOOR).log_()

    def _frames(self, samples_BS: Tensor) -> Tensor:
        """Frames after DC removal, pre-emphasis and windowing, zero-padded to the FFT size.

        In this order, since a large offset must be gone before anything is rounded. The first
        sample of a frame is its own predecessor.
        """
        config = self.config
        if use_kernel(samples_BS):
            from oasr_backend.kernels.frames_kernel import launch_cut_frames

            return launch_cut_frames(
                samples_BS,
                self.window,
                shift=config.frame_shift_samples,
                fft_size=config.fft_size,
                preemphasis=config.preemphasis,
                remove_dc=config.remove_dc,
            )
        length = config.frame_length_samples
        frames_BTN = samples_BS.unfold(1, length, config.frame_shift_samples)
        if config.remove_dc:
            frames_BTN = frames_BTN - frames_BTN.mean(-1, keepdim=True)
        # Written in place behind one allocation: at these sizes memory traffic is the cost.
        padded_BTN = frames_BTN.new_empty((*frames_BTN.shape[:2], config.fft_size))
        padded_BTN[..., length:].zero_()
        emphasised_BTN = padded_BTN[..., :length]
        torch.mul(frames_BTN, self.window, out=emphasised_BTN)
        emphasised_BTN[..., 1:].addcmul_(
            frames_BTN[..., :-1], self.window[1:], value=-config.preemphasis
        )
        emphasised_BTN[..., 0].mul_(1.0 - config.preemphasis)
        return padded_BTN


def frame_window(config: FbankConfig) -> Tensor:
    """The analysis window, float64, one weight per sample of a frame."""
    num_samples = config.frame_length_samples
    phase_N = torch.arange(num_samples, dtype=torch.float64) * (2 * math.pi / (num_samples - 1))
    if config.window == "rectangular":
        return torch.ones_like(phase_N)
    if config.window == "hamming":
        return 0.54 - 0.46 * torch.cos(phase_N)
    hann_N = 0.5 - 0.5 * torch.cos(phase_N)
    return hann_N**0.85 if config.window == "povey" else hann_N


def mel_matrix(config: FbankConfig) -> Tensor:
    """Triangles on the mel scale, float64, (fft_size / 2, num_mel_bins).

    Kaldi leaves out the Nyquist bin.
    """
    num_fft_bins = config.fft_size // 2
    bin_hz = config.sample_rate / config.fft_size
    mel_K1 = _mel(torch.arange(num_fft_bins, dtype=torch.float64) * bin_hz).unsqueeze(1)
    low, high = _mel(torch.tensor([config.low_freq, config.top_freq], dtype=torch.float64))
    width = (high - low) / (config.num_mel_bins + 1)
    left_F = low + width * torch.arange(config.num_mel_bins, dtype=torch.float64)
    rising_KF = (mel_K1 - left_F) / width
    return torch.minimum(rising_KF, 2.0 - rising_KF).clamp(min=0.0)


def _mel(freq_hz: Tensor) -> Tensor:
    return 1127.0 * torch.log1p(freq_hz / 700.0)
