"""Copies of the small Zipformer checkpoints, changed file by file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.conftest import GOLDEN_DIR

CTC, BOTH, EPOCH = "zip_ctc_small", "zip_rnnt_small", "zip_ctc_epoch"
#: A stack of full rate lies under the first name, one of a lower rate under the second.
LAYER = "encoder.encoders.0.layers.0"
LOWER_LAYER = "encoder.encoders.1.encoder.layers.0"

State = dict[str, Any]


def copy_icefall(tmp_path: Path, name: str = CTC) -> Path:
    """Without what the reader does not read."""
    unread = shutil.ignore_patterns("*.wav", "*.npz")
    return Path(shutil.copytree(GOLDEN_DIR / name, tmp_path / "checkpoint", ignore=unread))


def weights_of(directory: Path) -> Path:
    """The one weights file of a copy."""
    (path,) = directory.glob("*.pt")
    return path


def read_file(path: Path) -> State:
    """All that the weights file holds. Only of the goldens, which are ours."""
    content: State = torch.load(path, weights_only=False)
    return content


def edit_file(directory: Path, edit: Callable[[State], object]) -> None:
    """Changes the weights file at its top level."""
    path = weights_of(directory)
    content = read_file(path)
    edit(content)
    torch.save(content, path)


def edit_state(directory: Path, edit: Callable[[State], object]) -> None:
    """Changes the tensors under `model`."""
    edit_file(directory, lambda content: edit(content["model"]))


def set_tensor(directory: Path, name: str, tensor: Tensor) -> None:
    edit_state(directory, lambda state: state.update({name: tensor}))


def drop(directory: Path, *starts: str) -> None:
    """Takes out the tensors whose names begin so."""

    def edit(state: State) -> None:
        for name in [name for name in state if name.startswith(starts)]:
            del state[name]

    edit_state(directory, edit)


def renamed(directory: Path, old: str, new: str) -> None:
    """Replaces `old` by `new` in the name of every tensor."""

    def edit(content: State) -> None:
        content["model"] = {
            name.replace(old, new): tensor for name, tensor in content["model"].items()
        }

    edit_file(directory, edit)


def edit_arguments(directory: Path, **arguments: Any) -> None:
    """Writes into train_args.json; None takes an argument out."""
    path = directory / "train_args.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    told |= arguments
    told = {name: value for name, value in told.items() if value is not None}
    path.write_text(json.dumps(told), encoding="utf-8")


def edit_tokens(directory: Path, edit: Callable[[list[str]], list[str]]) -> None:
    """Changes the lines of tokens.txt."""
    path = directory / "tokens.txt"
    lines = edit(path.read_text(encoding="utf-8").splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
