"""Which of a WeNet directory's two normalisations counts: the file's or the weights'."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oasr_backend.checkpoints.weights import Weights
from oasr_backend.checkpoints.wenet.config import section
from oasr_backend.checkpoints.wenet.files import needed
from oasr_backend.errors import CheckpointError
from oasr_backend.features import GlobalCmvn, load_cmvn

logger = logging.getLogger(__name__)

_NAME = "encoder.global_cmvn"
#: Relative difference that rounding of float32 statistics explains.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class CmvnFile:
    path: Path
    statistics: GlobalCmvn


def read_cmvn(directory: Path, config: Mapping[str, Any], *, num_bins: int) -> CmvnFile | None:
    """The statistics of the file that train.yaml names; None where it names none.

    Raises CheckpointError for a file that is missing, or statistics of another number of bins.
    """
    name = (section(config, "cmvn_conf") or config).get("cmvn_file")
    if name is None:
        return None
    # Training machines write absolute paths; the file travels beside the weights.
    path = needed(directory, Path(str(name)).name)
    return CmvnFile(path, load_cmvn(path, num_bins=num_bins))


def choose_cmvn(file: CmvnFile | None, weights: Weights, *, num_bins: int) -> GlobalCmvn | None:
    """The file's, which has all digits, unless the weights' own differ: then those, as in WeNet.

    A copy; None where there is neither. Logs a warning where the two differ. Raises CheckpointError
    for statistics of another number of bins.
    """
    of_file = GlobalCmvn(file.statistics.mean, file.statistics.istd) if file else None
    if f"{_NAME}.mean" not in weights and f"{_NAME}.istd" not in weights:
        return of_file
    trained = _of_weights(weights, num_bins)
    if file is None or of_file is None:
        return trained
    difference = _difference(of_file, trained, weights)
    if not difference:
        return of_file
    logger.warning(
        "event=cmvn_differs %s and %s.* of %s differ (%s); those of the weights are served",
        file.path,
        weights.name_in_file(_NAME),
        weights.path,
        difference,
    )
    return trained


def _of_weights(weights: Weights, num_bins: int) -> GlobalCmvn:
    mean_F, istd_F = (weights.take(f"{_NAME}.{part}") for part in ("mean", "istd"))
    for part, values_F in (("mean", mean_F), ("istd", istd_F)):
        if values_F.shape != (num_bins,):
            raise CheckpointError(
                f"{weights.path}: {weights.name_in_file(_NAME)}.{part} is of shape "
                f"{tuple(values_F.shape)}, and the features have {num_bins} bins; take final.pt "
                "and train.yaml from one training"
            )
    return GlobalCmvn(mean_F, istd_F)


def _difference(of_file: GlobalCmvn, trained: GlobalCmvn, weights: Weights) -> str:
    """The first bin that rounding does not explain, with both values; empty for none."""
    for part, scale_F in (("mean", of_file.mean.abs() + 1 / of_file.istd), ("istd", of_file.istd)):
        given_F, trained_F = of_file.get_buffer(part), trained.get_buffer(part)
        eps = torch.finfo(weights.dtype_of(f"{_NAME}.{part}")).eps
        differs_F = (given_F - trained_F).abs() > max(_ROUNDING, eps) * scale_F
        if bool(differs_F.any()):
            first = int(differs_F.int().argmax())
            return f"{part} of bin {first}: {given_F[first]:g} and {trained_F[first]:g}"
    return ""
