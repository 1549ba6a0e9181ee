"""Copies of the small golden directory, changed file by file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.errors import CheckpointError
from oasr_backend.features import KaldiFrontend
from oasr_backend.models import AcousticModel, CtcHead
from tests.conftest import GOLDEN_DIR

SOURCE = GOLDEN_DIR / "wenet_small"


def copy_golden(tmp_path: Path, name: str = "wenet_small") -> Path:
    return Path(shutil.copytree(GOLDEN_DIR / name, tmp_path / "checkpoint"))


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "train.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    edit(config)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


def edit_yaml(directory: Path, **encoder_options: Any) -> None:
    edit_config(directory, lambda config: config["encoder_conf"].update(encoder_options))


def edit_features(directory: Path, *, sample_rate: Any = 16000, **fbank_options: Any) -> None:
    """`sample_rate` is that of the model's audio, the rest are options of fbank_conf."""

    def edit(config: dict[str, Any]) -> None:
        dataset = config["dataset_conf"]
        dataset["resample_conf"]["resample_rate"] = sample_rate
        dataset["fbank_conf"].update(fbank_options)

    edit_config(directory, edit)


def read_weights(directory: Path = SOURCE) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(directory / "final.pt", weights_only=True)
    return weights


def write_weights(directory: Path, weights: Mapping[str, Any]) -> None:
    torch.save(weights, directory / "final.pt")


def edit_weights(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    weights = read_weights(directory)
    edit(weights)
    write_weights(directory, weights)


def kaldi(model: AcousticModel) -> KaldiFrontend:
    assert isinstance(model.frontend, KaldiFrontend)
    return model.frontend


def ctc_head(model: AcousticModel) -> CtcHead:
    head = model.heads["ctc"]
    assert isinstance(head, CtcHead)
    return head


def refusal(directory: Path, *words: str) -> str:
    """Why the directory is not loaded; the message must hold `words`."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).load()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message
