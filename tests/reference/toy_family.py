"""The toy family of docs/add_an_encoder.md on a whole signal at once, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_FRAME, _SHIFT, _BANDS, _BINS_A_BAND = 160, 80, 8, 10
_KEPT = 0.95


def with_tail(samples_S: npt.NDArray[Any], *, chunk_size: int) -> Array:
    """As a server hears a signal that ends: silence to the end of a window behind the last one."""
    stride = chunk_size * 2 * _SHIFT
    num_samples = (samples_S.size // stride + 1) * stride + _FRAME - _SHIFT
    return np.pad(samples_S.astype(np.float64), (0, num_samples - samples_S.size))


def features(samples_S: Array) -> Array:
    """(W, 8) log energies of all whole frames."""
    window_S = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)
    rows = []
    for start in range(0, samples_S.size - _FRAME + 1, _SHIFT):
        spectrum = np.fft.rfft(samples_S[start : start + _FRAME] * window_S)
        power = np.abs(spectrum[1:]) ** 2
        rows.append([power[b * _BINS_A_BAND :][:_BINS_A_BAND].sum() for b in range(_BANDS)])
    return np.log(np.array(rows) + 1e-4)


def log_probs(features_WF: Array, weights: Mapping[str, npt.NDArray[Any]]) -> Array:
    """(T, V), T being half of the frames."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    normal_WF = features_WF - w["frontend.mean_F"]
    memory, rows = np.zeros(16), []
    for first, second in zip(normal_WF[::2], normal_WF[1::2], strict=False):
        pair = np.concatenate((first, second))
        x = np.tanh(w["encoder.stack.weight"] @ pair + w["encoder.stack.bias"])
        memory = _KEPT * memory + x
        encoded = x + np.tanh(w["encoder.mix.weight"] @ memory + w["encoder.mix.bias"])
        rows.append(w["heads.ctc.output.weight"] @ encoded + w["heads.ctc.output.bias"])
    logits_TV = np.array(rows)
    largest_T1 = logits_TV.max(axis=1, keepdims=True)
    return logits_TV - largest_T1 - np.log(np.exp(logits_TV - largest_T1).sum(1, keepdims=True))


def steady_text(log_probs_TV: Array, symbols: Sequence[str]) -> str:
    """Each token that is the best of two frames in a row or more, blanks left out."""
    runs = itertools.groupby(log_probs_TV.argmax(axis=1).tolist())
    return "".join(symbols[token] for token, run in runs if token and len(list(run)) >= 2)
