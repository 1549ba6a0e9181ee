"""Per-stream options: the request parameters of a START, checked before anything is allocated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from oasr_backend.errors import InvalidRequestError
from oasr_backend.types import ParameterValue

MIN_SAMPLE_RATE = 8000
MAX_SAMPLE_RATE = 48000


@dataclass(frozen=True)
class StreamOptions:
    """Field names are the request parameters' names."""

    # Rate of the samples that the client sends, in Hz.
    sample_rate: int = 16000

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, ParameterValue]) -> StreamOptions:
        """Raises InvalidRequestError naming an unknown or ill-typed parameter."""
        known = {field.name: str(field.type) for field in fields(cls)}
        for name, value in parameters.items():
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise InvalidRequestError(
                    f"unknown request parameter {name!r}={value!r}; did you mean {nearest!r}? "
                    f"Known: {', '.join(known)}"
                )
            if type(value).__name__ != known[name]:
                raise InvalidRequestError(
                    f"request parameter {name}={value!r} is a {type(value).__name__}; "
                    f"send it as {known[name]}"
                )
        return cls(**parameters)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if not MIN_SAMPLE_RATE <= self.sample_rate <= MAX_SAMPLE_RATE:
            raise InvalidRequestError(
                f"sample_rate={self.sample_rate} Hz is outside {MIN_SAMPLE_RATE} .. "
                f"{MAX_SAMPLE_RATE}; resample the audio or give its true rate"
            )
