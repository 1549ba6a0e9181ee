"""Request parameters: per-stream options at START, and the chunk number that any request may carry.

Everything is checked before anything is allocated.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from oasr_backend.errors import InvalidRequestError
from oasr_backend.types import ParameterValue

MIN_SAMPLE_RATE = 8000
MAX_SAMPLE_RATE = 48000
ENCODINGS = ("pcm", "mulaw", "alaw")
#: Numbers the requests of a stream, so that a lost or repeated one is noticed.
CHUNK_SEQ = "chunk_seq"


@dataclass(frozen=True)
class StreamOptions:
    """Field names are the request parameters' names."""

    # Rate of the samples that the client sends, in Hz.
    sample_rate: int = 16000
    # mulaw, alaw: PCM16 holds one G.711 code (0..255) an element.
    encoding: str = "pcm"
    # Mono only: interleaved channels cannot be told from mono samples.
    channels: int = 1

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, ParameterValue]) -> StreamOptions:
        """Raises InvalidRequestError naming an unknown or ill-typed parameter."""
        kinds = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in parameters.items():
            if name == CHUNK_SEQ:
                continue
            if name not in kinds:
                raise InvalidRequestError(_unknown(name, value, kinds))
            if type(value).__name__ != kinds[name]:
                raise InvalidRequestError(
                    f"request parameter {name}={value!r} is of type {type(value).__name__}; "
                    f"send it as {kinds[name]}"
                )
            values[name] = value
        return cls(**values)

    def __post_init__(self) -> None:
        if not MIN_SAMPLE_RATE <= self.sample_rate <= MAX_SAMPLE_RATE:
            raise InvalidRequestError(
                f"sample_rate={self.sample_rate} Hz is outside {MIN_SAMPLE_RATE} .. "
                f"{MAX_SAMPLE_RATE}; resample the audio or give its true rate"
            )
        if self.encoding not in ENCODINGS:
            raise InvalidRequestError(
                f"encoding={self.encoding!r} is unknown; send one of {', '.join(ENCODINGS)}"
            )
        if self.channels != 1:
            raise InvalidRequestError(
                f"channels={self.channels}: one stream is one mono signal; mix the channels down, "
                "or open one stream for each"
            )


def chunk_seq(parameters: Mapping[str, ParameterValue]) -> int | None:
    """The request's number, or None. Raises InvalidRequestError for anything but an integer."""
    value = parameters.get(CHUNK_SEQ)
    if value is None or type(value) is int:
        return value
    raise InvalidRequestError(
        f"request parameter {CHUNK_SEQ}={value!r} is of type {type(value).__name__}; send it as int"
    )


def check_later_parameters(parameters: Mapping[str, ParameterValue]) -> None:
    """Options belong to START; a change in mid-stream would be heard by nobody."""
    late = sorted(set(parameters) - {CHUNK_SEQ})
    if late:
        raise InvalidRequestError(
            f"request parameter {late[0]}={parameters[late[0]]!r} came after START; send it with "
            "the first request of the sequence"
        )


def _unknown(name: str, value: ParameterValue, known: Mapping[str, str]) -> str:
    names = [*known, CHUNK_SEQ]
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return (
        f"unknown request parameter {name!r}={value!r}; did you mean {nearest!r}? "
        f"Known: {', '.join(names)}"
    )
