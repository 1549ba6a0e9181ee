"""icefall's results for three small checkpoints of random weights, by settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from oasr_backend.config import ServingConfig
from oasr_backend.types import Samples
from tests.conftest import GOLDEN_DIR

CHECKPOINTS = ("zip_ctc_small", "zip_rnnt_small", "zip_ctc_epoch")


@dataclass(frozen=True)
class ZipGolden:
    """`c` frames of 20 ms a chunk, and so many left chunks; arrays by icefall's names."""

    directory: Path
    setting: str
    chunk_size: int
    num_left_chunks: int

    @cached_property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return _arrays(self.directory.name)

    def __getitem__(self, key: str) -> npt.NDArray[Any]:
        return self.arrays[f"{self.setting}.{key}"]

    def text(self, key: str) -> str:
        return str(self[key])

    @property
    def feats_TF(self) -> npt.NDArray[np.float32]:  # noqa: N802 - named for its shape
        return self.arrays["feats"]

    @property
    def has_transducer(self) -> bool:
        return f"{self.setting}.rnnt_greedy" in self.arrays

    @property
    def texts(self) -> dict[str, str]:
        """By the search that finds it."""
        texts = {"greedy": self.text("text")}
        if self.has_transducer:
            texts["transducer_greedy"] = self.text("rnnt_text")
            texts["transducer_beam"] = self.text("rnnt_beam_text")
        return texts

    @property
    def settings(self) -> dict[str, int]:
        return {"chunk_size": self.chunk_size, "num_left_chunks": self.num_left_chunks}

    def config(self, **more: Any) -> ServingConfig:
        return ServingConfig.of(**self.settings, **more)

    def audio(self) -> Samples:
        samples_S, _ = soundfile.read(self.directory / "audio.wav", dtype="float32")
        return np.asarray(samples_S, dtype=np.float32)


@cache
def _arrays(name: str) -> dict[str, npt.NDArray[Any]]:
    return dict(np.load(GOLDEN_DIR / name / "expected.npz"))


@cache
def zip_goldens() -> dict[str, ZipGolden]:
    """By checkpoint and setting."""
    found = {}
    for name in CHECKPOINTS:
        for setting in map(str, _arrays(name)["settings"]):
            chunk, left = setting.split("_")
            found[f"{name}-{setting}"] = ZipGolden(
                GOLDEN_DIR / name, setting, int(chunk[1:]), int(left[1:])
            )
    return found
