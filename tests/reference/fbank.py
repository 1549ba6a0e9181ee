"""Filterbank features in float64, and how far float32 may be from them by rounding alone.

Shapes: T frames, N samples of one frame, K FFT bins, F mel bins.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_backend.features.fbank import FbankConfig, frame_window, mel_matrix
from tests.rounding import CONFIDENCE, UNIT32, gamma

_FLOOR = torch.finfo(torch.float32).eps


class ExactFeatures(NamedTuple):
    """Log-mel energies by definition, and the error that float32 arithmetic may make in each."""

    log_mel_TF: Tensor
    bound_TF: Tensor


class _Frames(NamedTuple):
    """`common_T1` errs alike for all samples of a frame, `error_TN` for each by itself."""

    value_TN: Tensor
    common_T1: Tensor
    error_TN: Tensor


def exact_features(
    samples: npt.NDArray[np.float32], config: FbankConfig, *, mel_error: float = UNIT32
) -> ExactFeatures:
    """Kaldi's definition step by step in float64, each step with its bound.

    `mel_error` is what a weight of the mel triangles may be off by, absolutely.
    """
    scaled_S = torch.from_numpy(samples).double() * config.audio_scale
    frames = _centred(scaled_S, config)
    spectrum_TK = torch.fft.rfft(_emphasised(frames.value_TN, config), n=config.fft_size)[:, :-1]
    amplitude_TK = spectrum_TK.abs()
    error_TK = _carried(frames, config) + _transform_error(amplitude_TK, frames, config)
    power_TK = amplitude_TK.square()
    power_error_TK = (2 * amplitude_TK + error_TK) * error_TK + gamma(3) * power_TK
    mel_KF = mel_matrix(config)
    energy_TF = power_TK @ mel_KF
    # Bins outside a triangle add zeros, which round nothing.
    widest = int((mel_KF > 0).sum(0).max())
    energy_error_TF = (
        power_error_TK @ mel_KF
        + (power_TK + power_error_TK) @ _uncertain(mel_KF, mel_error)
        + gamma(widest) * energy_TF
    )
    log_mel_TF = energy_TF.clamp(min=_FLOOR).log()
    return ExactFeatures(log_mel_TF, _logarithm_error(energy_TF, energy_error_TF))


def _centred(scaled_S: Tensor, config: FbankConfig) -> _Frames:
    frames_TN = scaled_S.unfold(0, config.frame_length_samples, config.frame_shift_samples)
    if not config.remove_dc:
        return _Frames(frames_TN, frames_TN.new_zeros(len(frames_TN), 1), 0 * frames_TN)
    mean_T1, size_T1 = (x.mean(-1, keepdim=True) for x in (frames_TN, frames_TN.abs()))
    # Equal samples round alike, so that their errors add up without a square root.
    mean_error_T1 = gamma(frames_TN.shape[1] + 1) * size_T1
    centred_TN = frames_TN - mean_T1
    return _Frames(centred_TN, mean_error_T1, UNIT32 * (centred_TN.abs() + mean_error_T1))


def _emphasised(x_TN: Tensor, config: FbankConfig, *, sign: float = -1.0) -> Tensor:
    """After pre-emphasis and window; `sign` +1 adds magnitudes."""
    previous_TN = torch.cat([x_TN[:, :1], x_TN[:, :-1]], dim=1)
    return (x_TN + sign * config.preemphasis * previous_TN) * frame_window(config)


def _carried(frames: _Frames, config: FbankConfig) -> Tensor:
    """(T, K) error of a bin from the frames: a common offset is one tone, the rest is noise."""
    offset_1N = _emphasised(torch.ones_like(frames.value_TN[:1]), config)
    offset_1K = torch.fft.rfft(offset_1N, n=config.fft_size)[:, :-1].abs()
    own_TN = _emphasised(frames.error_TN, config, sign=1.0)
    # Each of the two terms takes five roundings at most.
    own_TN = own_TN + gamma(5) * _emphasised(frames.value_TN.abs(), config, sign=1.0)
    return frames.common_T1 * offset_1K + CONFIDENCE * own_TN.norm(dim=-1, keepdim=True)


def _transform_error(amplitude_TK: Tensor, frames: _Frames, config: FbankConfig) -> Tensor:
    """(T, 1) of every bin: what a fast Fourier transform in float32 adds.

    The roundings of a stage are spread over all bins, so that each gets a unit of the frame's norm
    (Parseval). The last stage takes real input apart: it mixes a bin with its mirror, which may
    be the loudest.
    """
    norm_T1 = _emphasised(frames.value_TN, config).norm(dim=-1, keepdim=True)
    stages = math.sqrt(math.log2(config.fft_size))
    return CONFIDENCE * UNIT32 * (stages * norm_T1 + amplitude_TK.amax(-1, keepdim=True))


def _uncertain(mel_KF: Tensor, mel_error: float) -> Tensor:
    """(K, F): `mel_error` where a triangle is, and at the bins on either side of it."""
    inside_FK = (mel_KF.T > 0).double()
    near_FK = torch.nn.functional.max_pool1d(inside_FK[None], 3, stride=1, padding=1)[0]
    return mel_error * near_FK.T


def _logarithm_error(energy_TF: Tensor, error_TF: Tensor) -> Tensor:
    """The larger of the two distances to log(energy -+ error), both held at the floor."""
    exact_TF, low_TF, high_TF = (
        x_TF.clamp(min=_FLOOR).log()
        for x_TF in (energy_TF, energy_TF - error_TF, energy_TF + error_TF)
    )
    own_TF = gamma(4) * torch.maximum(high_TF.abs(), low_TF.abs())
    return torch.maximum(high_TF - exact_TF, exact_TF - low_TF) + own_TF
