"""The families of docs/add_an_encoder.md as a user has them: installed, with a checkpoint."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from oasr_backend.types import Samples
from tests.conftest import ROOT
from tests.doc_blocks import python_blocks

DOCUMENT = ROOT / "docs" / "add_an_encoder.md"
PACKAGES = ("toy_family", "attending_family")
SYMBOLS = ("<blank>", *"abcdefghijkl")
RATE = 8_000
#: Of the checkpoint, as its format has them.
SHAPES = {
    "frontend.mean_F": (8,),
    "encoder.stack.weight": (16, 16),
    "encoder.stack.bias": (16,),
    "encoder.mix.weight": (16, 16),
    "encoder.mix.bias": (16,),
    "heads.ctc.output.weight": (len(SYMBOLS), 16),
    "heads.ctc.output.bias": (len(SYMBOLS),),
}
_FILE = re.compile(r"# (\w+/\w+\.py)\n")
_PROJECT = re.compile(r"^```toml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ENTRY_POINT = re.compile(
    r'^\[project\.entry-points\."([\w.]+)"\]\n(\w+) = "([\w.:]+)"$', re.MULTILINE
)


def project() -> str:
    """The document's pyproject.toml."""
    (text,) = _PROJECT.findall(DOCUMENT.read_text(encoding="utf-8"))
    return str(text)


def write_family(folder: Path) -> None:
    """Writes the document's modules."""
    for block in python_blocks(DOCUMENT):
        name = _FILE.match(block)
        assert name is not None, f"a block names no file: {block[:60]!r}"
        path = folder / name[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block, encoding="utf-8")


def install(site: Path) -> None:
    """Writes what an installer makes of the document: the modules, and a name for the reader."""
    write_family(site)
    ((group, name_of, value),) = _ENTRY_POINT.findall(project())
    about = site / "toy_family-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name_of} = {value}\n")


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """In this process, until the end of the context."""
    install(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
                del sys.modules[name]
    importlib.invalidate_caches()


def toy_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of no training, which tell one sound from another."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["frontend.mean_F"] -= 1.0
    for name in ("encoder.stack.weight", "encoder.mix.weight"):
        tensors[name] *= 0.25
    return tensors


def write_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.json").write_text(json.dumps({"symbols": SYMBOLS}), encoding="utf-8")
    torch.save(dict(toy_tensors() if tensors is None else tensors), folder / "toy.pt")
    return folder


def tune(seed: int, *, seconds: float, rate: int = RATE) -> Samples:
    """Tones of 0.1 s to 0.4 s in noise, below 4 kHz at any rate."""
    chance = np.random.default_rng(seed)
    pieces = []
    while sum(map(len, pieces)) < seconds * rate:
        time_S = np.arange(round(chance.uniform(0.1, 0.4) * rate)) / rate
        pieces.append(
            0.3 * np.sin(2 * np.pi * chance.uniform(100, 3_800) * time_S)
            + 0.01 * chance.standard_normal(time_S.size)
        )
    return np.concatenate(pieces)[: round(seconds * rate)].astype(np.float32)
