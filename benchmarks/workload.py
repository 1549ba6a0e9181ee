"""The audio of all benchmarks: the demo model's recordings, joined and cut into equal utterances.

Every request of an utterance carries the same 640 ms, so requests a second times CHUNK_S are
audio seconds a second, in process and through a server alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

from benchmarks.models import Model, StoredModel
from benchmarks.report import RESULTS_DIRECTORY, ROOT

SAMPLE_RATE = 16_000
CHUNK_S = 0.64
CHUNK_SAMPLES = int(SAMPLE_RATE * CHUNK_S)
#: An utterance lasts 12.8 s, about as long as people speak before they pause.
CHUNKS_PER_UTTERANCE = 20
MODEL_REPOSITORY = ROOT / "model_repository"
MODEL_NAME = "oasr_streaming"
DEMO_DIRECTORY = MODEL_REPOSITORY / MODEL_NAME / "demo_en"
DEMO = StoredModel(DEMO_DIRECTORY)

FloatArray = npt.NDArray[np.float32]
#: The chunks of one stream, first to last.
Utterance = Sequence[FloatArray]


@dataclass(frozen=True)
class Options:
    """The choices of the command line. `quick` measures little, to show that the program runs.

    `settings` are the server's, by their flat keys.
    """

    device: str = "cpu"
    quick: bool = False
    repeats: int = 5
    num_threads: int = 2
    results: Path = RESULTS_DIRECTORY
    model: Model = DEMO
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_repeats(self) -> int:
        return 1 if self.quick else self.repeats


def recordings() -> list[Path]:
    """The 16 kHz mono files that ship with the demo model."""
    folders = [DEMO_DIRECTORY / name for name in ("testset", "eval")]
    return sorted(path for folder in folders for path in folder.iterdir()
                  if path.suffix in (".wav", ".flac"))  # fmt: skip


def read_audio(path: Path) -> FloatArray:
    """Mono float32 samples. Raises ValueError for another rate than the model's."""
    samples_S, sample_rate = soundfile.read(path, dtype="float32")
    if sample_rate != SAMPLE_RATE or samples_S.ndim != 1:
        raise ValueError(
            f"{path} has {sample_rate} Hz and {samples_S.ndim} dimensions; give mono files of "
            f"{SAMPLE_RATE} Hz"
        )
    mono_S: FloatArray = samples_S
    return mono_S


def utterances(*, quick: bool = False) -> list[Utterance]:
    """Running speech, CHUNKS_PER_UTTERANCE chunks of CHUNK_SAMPLES each."""
    paths = recordings()[:8] if quick else recordings()
    joined_S = np.concatenate([read_audio(path) for path in paths])
    size = CHUNKS_PER_UTTERANCE * CHUNK_SAMPLES
    whole = joined_S[: joined_S.size // size * size]
    return [list(chunks) for chunks in whole.reshape(-1, CHUNKS_PER_UTTERANCE, CHUNK_SAMPLES)]
