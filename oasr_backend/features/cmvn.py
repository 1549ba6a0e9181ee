"""Global mean and variance normalisation of features, from WeNet's or Kaldi's statistics."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from oasr_backend.errors import CheckpointError

logger = logging.getLogger(__name__)

_Array = npt.NDArray[np.float64]
_MIN_VARIANCE = 1e-20
#: Part of the squared mean that rounding of the sums explains.
_ROUNDING = 1e-5
#: How Kaldi begins a binary matrix, behind the key of an archive's entry if there is one.
_KALDI_BINARY = b"\0B"


class GlobalCmvn(nn.Module):
    """(features - mean) * istd, with one mean and one inverse deviation per feature bin.

    The buffers are named as in a WeNet checkpoint (`encoder.global_cmvn.mean` and `.istd`).
    """

    mean: Tensor
    istd: Tensor

    def __init__(self, mean_F: Tensor, istd_F: Tensor) -> None:
        """Copies both as float32. Raises CheckpointError unless they match and are finite."""
        super().__init__()
        if mean_F.dim() != 1 or mean_F.shape != istd_F.shape:
            raise CheckpointError(
                f"CMVN mean has shape {tuple(mean_F.shape)} and istd {tuple(istd_F.shape)}; "
                "both need one value per feature bin: make the statistics again"
            )
        if not bool(torch.isfinite(mean_F).all() and torch.isfinite(istd_F).all()):
            raise CheckpointError("CMVN holds a non-finite value; make the statistics again")
        self.register_buffer("mean", mean_F.detach().clone().float())
        self.register_buffer("istd", istd_F.detach().clone().float())

    @property
    def num_bins(self) -> int:
        return self.mean.numel()

    def forward(self, features_BTF: Tensor) -> Tensor:
        return (features_BTF - self.mean) * self.istd


@dataclass(frozen=True)
class _Statistics:
    """Sums and sums of squares of one value a bin over `num_frames` frames."""

    sums_F: _Array
    squares_F: _Array
    num_frames: float


def load_cmvn(path: str | Path, *, num_bins: int | None = None) -> GlobalCmvn:
    """Reads a statistics file of `num_bins` feature bins, or of as many as it has.

    JSON (WeNet): `mean_stat` (sums), `var_stat` (sums of squares) and `frame_num`. Kaldi text: a
    2-row matrix, sums then sums of squares, the count of frames behind the sums; JSON of a known
    `num_bins` may have it there too. What the file holds tells which of the two it is.

    Raises CheckpointError naming the file and what is wrong in it.
    """
    path = Path(path)
    try:
        text = _read_text(path)
        statistics = (
            _from_json(text, num_bins) if text.startswith("{") else _from_kaldi(text, num_bins)
        )
        _check_size(statistics, num_bins)
        return _normalisation(statistics, path)
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(
            f"CMVN file {path}: {error}; give the training's statistics as WeNet JSON or Kaldi text"
        ) from error


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"it cannot be read ({error})") from error
    if _KALDI_BINARY in content[:256]:
        raise CheckpointError(
            "it is a binary Kaldi matrix; `copy-matrix --binary=false` makes text of it"
        )
    try:
        return content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"it is neither JSON nor Kaldi text ({error})") from error


def _from_json(text: str, num_bins: int | None) -> _Statistics:
    content = json.loads(text)
    sums, squares = _numbers(content, "mean_stat"), _numbers(content, "var_stat")
    has_count = sums.size - 1 == num_bins
    if has_count and "frame_num" not in content:
        content["frame_num"] = sums[-1]
    num_frames = float(_numbers(content, "frame_num"))
    if not has_count:
        return _Statistics(sums, squares, num_frames)
    if sums[-1] != num_frames:
        raise CheckpointError(
            f"it has {sums.size} sums for {num_bins} bins, and the last of them, {sums[-1]:g}, is "
            f"not the frame_num {num_frames:g}"
        )
    squares_F = squares[:-1] if squares.size == sums.size else squares
    return _Statistics(sums[:-1], squares_F, num_frames)


def _numbers(content: Any, key: str) -> _Array:
    """One number a bin, or the one number of `frame_num`."""
    if key not in content:
        raise CheckpointError(f"it lacks {key!r}; found is {', '.join(map(repr, content))}")
    try:
        values = np.asarray(content[key], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{key} holds something other than numbers ({error})") from error
    if values.ndim != (key != "frame_num"):
        raise CheckpointError(f"{key} is of shape {values.shape}")
    return values


def _from_kaldi(text: str, num_bins: int | None) -> _Statistics:
    opening, closing = text.find("["), text.rfind("]")
    if opening < 0 or closing < opening:
        raise CheckpointError("it is neither JSON nor Kaldi text: no { and no [ ... ] in it")
    try:
        values = np.array(text[opening + 1 : closing].split(), dtype=np.float64)
    except ValueError as error:
        raise CheckpointError(f"as Kaldi text it holds something else ({error})") from error
    if values.size % 2 or values.size < 4:
        raise CheckpointError(f"as Kaldi text its {values.size} numbers do not make two rows")
    sums, squares = values.reshape(2, -1)
    # Below a count stands a zero.
    if sums.size == num_bins and squares[-1] != 0:
        raise CheckpointError(
            f"as Kaldi text its rows have {sums.size} numbers, one a bin, and lack the count of "
            "frames behind the sums"
        )
    return _Statistics(sums[:-1], squares[:-1], float(sums[-1]))


def _check_size(statistics: _Statistics, num_bins: int | None) -> None:
    sizes = statistics.sums_F.size, statistics.squares_F.size
    wanted = sizes[0] if num_bins is None else num_bins
    if sizes != (wanted, wanted):
        raise CheckpointError(
            f"it has sums of {sizes[0]} bins and sums of squares of {sizes[1]}, but the features "
            f"have {wanted}"
        )


def _normalisation(statistics: _Statistics, path: Path) -> GlobalCmvn:
    if not 0 < statistics.num_frames < math.inf:
        raise CheckpointError(f"it counts {statistics.num_frames:g} frames; one at least is needed")
    mean_F = statistics.sums_F / statistics.num_frames
    variance_F = statistics.squares_F / statistics.num_frames - mean_F**2
    if not np.isfinite(variance_F).all():
        raise CheckpointError(f"bin {np.isfinite(variance_F).argmin()} holds a non-finite value")
    _check_variance(variance_F, mean_F, path)
    istd_F = 1.0 / np.sqrt(np.maximum(variance_F, _MIN_VARIANCE))
    return GlobalCmvn(torch.from_numpy(mean_F), torch.from_numpy(istd_F))


def _check_variance(variance_F: _Array, mean_F: _Array, path: Path) -> None:
    """A variance below zero is no such thing; one of zero is a bin that says nothing."""
    negative_F = variance_F < -_ROUNDING * (mean_F**2 + _MIN_VARIANCE)
    if negative_F.any():
        first = int(negative_F.argmax())
        raise CheckpointError(
            f"the variance of bin {first} is {variance_F[first]:g}, and none is below zero: what "
            "should be sums of squares is something else"
        )
    constant = np.flatnonzero(variance_F < _MIN_VARIANCE).tolist()
    if constant:
        logger.warning(
            "event=cmvn_constant CMVN file %s: bins %s have no variance and are scaled by %g",
            path,
            constant,
            _MIN_VARIANCE**-0.5,
        )
