"""The streams' audio: recordings cut into chunks that are serialised once."""

from __future__ import annotations

import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.load import wire

SAMPLE_RATE = 16_000
Pcm = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Recording:
    name: str
    samples_S: Pcm


@dataclass(frozen=True)
class Utterance:
    """`bodies[k]` is chunk k on the wire; its audio is complete `ready_s[k]` after the start.

    `expected_text` is None where no text is known, and then any text is right.
    """

    name: str
    bodies: tuple[bytes, ...]
    ready_s: tuple[float, ...]
    expected_text: str | None = None

    @property
    def duration_s(self) -> float:
        return self.ready_s[-1]


def read_folder(folder: Path) -> list[Recording]:
    """All recordings of a folder, by name. Raises ValueError when there is none to use."""
    recordings = [Recording(path.name, read_pcm(path)) for path in sorted(folder.glob("*.wav"))]
    if not recordings:
        raise ValueError(f"{folder} holds no *.wav; give --audio a folder of 16 kHz mono files")
    return recordings


def read_pcm(path: Path) -> Pcm:
    """Mono 16-bit samples at 16 kHz. Raises ValueError for any other kind of file."""
    with wave.open(str(path), "rb") as file:
        kind = (file.getnchannels(), file.getsampwidth() * 8, file.getframerate())
        if kind != (1, 16, SAMPLE_RATE):
            raise ValueError(
                f"{path.name} has (channels, bits, Hz) = {kind}; convert it to (1, 16, 16000)"
            )
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")


def noise(*, count: int, seconds: float) -> list[Recording]:
    """Repeatable noise at speech level, for machines without recordings."""
    generator = np.random.default_rng(0)
    num_samples = int(seconds * SAMPLE_RATE)
    levels = generator.normal(0.0, 1000.0, size=(count, num_samples)).astype(np.int16)
    return [Recording(f"noise_{index}", row) for index, row in enumerate(levels)]


def cut(recording: Recording, *, chunk_ms: float, dtype: str) -> Utterance:
    """The last chunk is what remains, so it is ready when the recording ends."""
    step = max(1, round(chunk_ms * SAMPLE_RATE / 1000))
    samples_S: npt.NDArray[Any] = wire.to_dtype(recording.samples_S, dtype)
    starts = range(0, max(1, samples_S.size), step)
    return Utterance(
        name=recording.name,
        bodies=tuple(wire.body(samples_S[start : start + step], dtype) for start in starts),
        ready_s=tuple(min(start + step, samples_S.size) / SAMPLE_RATE for start in starts),
    )


def with_expected(
    utterances: Sequence[Utterance], texts: Mapping[str, str]
) -> tuple[Utterance, ...]:
    return tuple(replace(one, expected_text=texts.get(one.name)) for one in utterances)
