"""Audio as the server wants it: mono float32 at 16 kHz, cut into chunks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from oasr_client.errors import InvalidAudioError
from oasr_client.mono import SAMPLE_RATE_HZ, Converter, Mono, check_rate
from oasr_client.recording import Recording
from oasr_client.sources import RawFormat

MAX_CHUNK_MS = 86_400_000
_RAW_SUBTYPES = {"pcm16": "PCM_16", "mulaw": "ULAW", "alaw": "ALAW"}


def read_audio(path: str | Path) -> Mono:
    """Any plain file and channel count that libsndfile reads, at 4..384 kHz, as a whole.

    Raises InvalidAudioError. Warns of channels that cancel each other and of a header that denies
    its samples.
    """
    return _read(Path(path), None)


def read_raw(
    path: str | Path,
    encoding: Literal["pcm16", "mulaw", "alaw"] = "pcm16",
    *,
    sample_rate_hz: int = SAMPLE_RATE_HZ,
    channels: int = 1,
) -> Mono:
    """A file without a header, little-endian, at 4..384 kHz. Raises InvalidAudioError."""
    return _read(Path(path), raw_format(encoding, sample_rate_hz, channels))


def iter_audio(path: str | Path, chunk_ms: float) -> Iterator[Mono]:
    """`read_audio` in chunks as those of `iter_chunks`; holds about a second of a file of hours."""
    with Recording(Path(path)) as recording:
        yield from rechunked(recording.blocks(), chunk_ms)
    _pass_on(path, recording)


def raw_format(encoding: str, sample_rate_hz: int, channels: int = 1) -> RawFormat:
    """Raises InvalidAudioError for an unknown encoding or a rate outside 4..384 kHz."""
    check_rate(sample_rate_hz)
    if encoding not in _RAW_SUBTYPES:
        raise InvalidAudioError(
            f"raw encoding {encoding!r} is unknown; use one of {', '.join(_RAW_SUBTYPES)}"
        )
    return RawFormat(_RAW_SUBTYPES[encoding], sample_rate_hz, channels)


def to_mono_16k(samples_NC: npt.NDArray[Any], sample_rate_hz: int) -> Mono:
    """Averages the channels of floats in [-1, 1] and resamples with soxr's HQ filter.

    Where the channels cancel each other one of them is taken. Raises InvalidAudioError for a rate
    outside 4..384 kHz.
    """
    converter = Converter(sample_rate_hz)
    columns_NC = np.asarray(samples_NC, np.float32).reshape(len(samples_NC), -1)
    return np.concatenate([converter.convert(columns_NC), converter.finish()])


def iter_chunks(samples: npt.NDArray[Any], chunk_ms: float) -> Iterator[npt.NDArray[Any]]:
    """Views of `chunk_ms` milliseconds, the last one shorter; one empty view of no samples."""
    step = chunk_samples(chunk_ms)
    for start in range(0, max(samples.size, 1), step):
        yield samples[start : start + step]


def rechunked(blocks: Iterable[Mono], chunk_ms: float) -> Iterator[Mono]:
    """The samples of the blocks as `iter_chunks` cuts them."""
    step = chunk_samples(chunk_ms)
    held: list[Mono] = []
    num_held = 0
    for block in blocks:
        held.append(block)
        num_held += block.size
        # The last chunk is not yielded here, since more samples may follow it.
        if num_held > step:
            *full, rest = iter_chunks(np.concatenate(held), chunk_ms)
            yield from full
            held, num_held = [rest], rest.size
    yield np.concatenate(held) if held else np.empty(0, np.float32)


def chunk_samples(chunk_ms: float) -> int:
    """Samples in `chunk_ms` milliseconds. Raises InvalidAudioError outside one sample .. a day."""
    if not 0.0625 <= chunk_ms <= MAX_CHUNK_MS:
        raise InvalidAudioError(
            f"chunk_ms is {chunk_ms}, it must be 0.0625 (one sample) to {MAX_CHUNK_MS} (a day); "
            "640 is usual"
        )
    return round(chunk_ms * SAMPLE_RATE_HZ / 1000)


def seconds(num_samples: int) -> float:
    return num_samples / SAMPLE_RATE_HZ


def _read(path: Path, raw: RawFormat | None) -> Mono:
    with Recording(path, raw) as recording:
        blocks = list(recording.blocks())
    _pass_on(path, recording)
    return np.concatenate([*blocks, np.empty(0, np.float32)])


def _pass_on(path: str | Path, recording: Recording) -> None:
    for words in recording.warnings:
        warnings.warn(f"{path}: {words}", stacklevel=3)
