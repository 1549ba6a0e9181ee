"""Audio files as the server wants them: mono float32 at 16 kHz, cut into chunks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from oasr_client.errors import InvalidAudioError

SAMPLE_RATE_HZ = 16000
#: Below, speech is not intelligible and resampling multiplies a file's size; above, no recorder.
MIN_FILE_RATE_HZ = 4000
MAX_FILE_RATE_HZ = 384000
MAX_CHUNK_MS = 86_400_000
_RAW_SUBTYPES = {"pcm16": "PCM_16", "mulaw": "ULAW", "alaw": "ALAW"}

Mono = npt.NDArray[np.float32]


def read_audio(path: str | Path) -> Mono:
    """Any plain file and channel count that libsndfile reads, at 4..384 kHz.

    Raises InvalidAudioError.
    """
    return _read(path)


def read_raw(
    path: str | Path,
    encoding: Literal["pcm16", "mulaw", "alaw"] = "pcm16",
    *,
    sample_rate_hz: int = SAMPLE_RATE_HZ,
    channels: int = 1,
) -> Mono:
    """A file without a header, little-endian, at 4..384 kHz. Raises InvalidAudioError."""
    check_rate(sample_rate_hz)
    if encoding not in _RAW_SUBTYPES:
        raise InvalidAudioError(
            f"raw encoding {encoding!r} is unknown; use one of {', '.join(_RAW_SUBTYPES)}"
        )
    return _read(
        path,
        format="RAW",
        subtype=_RAW_SUBTYPES[encoding],
        samplerate=sample_rate_hz,
        channels=channels,
        endian="LITTLE",
    )


def to_mono_16k(samples_NC: npt.NDArray[Any], sample_rate_hz: int) -> Mono:
    """Averages the channels of floats in [-1, 1] and resamples with soxr's HQ filter.

    Raises InvalidAudioError for a rate outside 4..384 kHz.
    """
    check_rate(sample_rate_hz)
    mono = samples_NC.mean(axis=1, dtype=np.float32) if samples_NC.ndim == 2 else samples_NC
    mono = np.ascontiguousarray(mono, dtype=np.float32)
    if sample_rate_hz == SAMPLE_RATE_HZ or mono.size == 0:
        return mono
    return np.asarray(soxr.resample(mono, sample_rate_hz, SAMPLE_RATE_HZ, quality="HQ"))


def check_rate(sample_rate_hz: int) -> None:
    if not MIN_FILE_RATE_HZ <= sample_rate_hz <= MAX_FILE_RATE_HZ:
        raise InvalidAudioError(
            f"the sample rate is {sample_rate_hz} Hz, expected {MIN_FILE_RATE_HZ} to "
            f"{MAX_FILE_RATE_HZ}; name the recording's own rate, or convert it to 16000 Hz"
        )


def iter_chunks(samples: npt.NDArray[Any], chunk_ms: float) -> Iterator[npt.NDArray[Any]]:
    """Views of `chunk_ms` milliseconds, the last one shorter; one empty view of no samples."""
    step = chunk_samples(chunk_ms)
    for start in range(0, max(samples.size, 1), step):
        yield samples[start : start + step]


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


def _read(path: str | Path, **raw: Any) -> Mono:
    _check_plain(path)
    try:
        with soundfile.SoundFile(path, **raw) as file:
            # Before the samples: a header that lies about the rate must not cost memory.
            check_rate(file.samplerate)
            samples_NC, rate_hz = file.read(dtype="float32", always_2d=True), file.samplerate
    except InvalidAudioError as error:
        raise InvalidAudioError(f"{path}: {error}") from error
    except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
        raise InvalidAudioError(
            f"{path}: not readable as audio ({error}); convert it to WAV or FLAC, "
            "or name its raw encoding"
        ) from error
    return to_mono_16k(samples_NC, rate_hz)


def _check_plain(path: str | Path) -> None:
    try:
        is_plain = stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError) as error:
        if str(path) != "-":
            raise InvalidAudioError(f"{path}: no such file; check the path") from error
        is_plain = False
    except (OSError, ValueError) as error:
        raise InvalidAudioError(f"{path}: not accessible ({error}); check the path") from error
    if not is_plain:
        raise InvalidAudioError(
            f"{path}: not a plain file; write the audio into a file and name that"
        )
