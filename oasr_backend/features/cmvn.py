"""Global mean and variance normalisation of features, from WeNet's or Kaldi's statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from oasr_backend.errors import CheckpointError

_Array = npt.NDArray[np.float64]
_MIN_VARIANCE = 1e-20


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


def load_cmvn(path: str | Path, *, is_json: bool | None = None) -> GlobalCmvn:
    """Reads a statistics file; `is_json` None looks at its first character.

    JSON (WeNet): `mean_stat` (sums), `var_stat` (sums of squares) and `frame_num`.
    Kaldi text: a 2-row matrix, sums then sums of squares, the count at the end of the first row.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"CMVN file {path} cannot be read as text ({error}); give JSON or Kaldi text statistics"
        ) from error
    as_json = text.startswith("{") if is_json is None else is_json
    try:
        sums_F, squares_F, num_frames = _read_json(text) if as_json else _read_kaldi(text)
    except (KeyError, TypeError, ValueError) as error:
        kind = "WeNet JSON" if as_json else "Kaldi text"
        raise CheckpointError(
            f"CMVN file {path} is not {kind} statistics ({error!r}); check is_json_cmvn"
        ) from error
    return _from_statistics(sums_F, squares_F, num_frames)


def _from_statistics(sums_F: _Array, squares_F: _Array, num_frames: float) -> GlobalCmvn:
    if not num_frames > 0:
        raise CheckpointError(f"CMVN counts {num_frames} frames; it needs at least 1")
    if sums_F.ndim != 1 or sums_F.shape != squares_F.shape:
        raise CheckpointError(
            f"CMVN sums have shape {sums_F.shape} and squares {squares_F.shape}; "
            "both need one value per feature bin: make the statistics again"
        )
    mean_F = sums_F / num_frames
    variance_F = np.maximum(squares_F / num_frames - mean_F**2, _MIN_VARIANCE)
    return GlobalCmvn(torch.from_numpy(mean_F), torch.from_numpy(1.0 / np.sqrt(variance_F)))


def _read_json(text: str) -> tuple[_Array, _Array, float]:
    stats = json.loads(text)
    sums_F = np.asarray(stats["mean_stat"], dtype=np.float64)
    squares_F = np.asarray(stats["var_stat"], dtype=np.float64)
    return sums_F, squares_F, float(stats["frame_num"])


def _read_kaldi(text: str) -> tuple[_Array, _Array, float]:
    opening, closing = text.index("["), text.rindex("]")
    values = np.array(text[opening + 1 : closing].split(), dtype=np.float64)
    if values.size % 2 or values.size < 4:
        raise ValueError(f"{values.size} values do not make two rows")
    sums, squares = values.reshape(2, -1)
    return sums[:-1], squares[:-1], float(sums[-1])
