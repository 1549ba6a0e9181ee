"""What the layers hand to each other. Torch-free, frozen, built whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from oasr_backend.errors import OasrError

#: A Triton correlation id. The integer 42 and the string "42" are two streams.
StreamId = int | str
#: Mono audio, float32 in [-1, 1].
Samples = npt.NDArray[np.float32]
#: A request parameter as Triton hands it over.
ParameterValue = bool | int | float | str


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Hypothesis:
    """One decoded token sequence. `times` are the encoder frames at which the tokens appear.

    `token_log_probs` are the acoustic log-probs of the tokens at their best frame.
    """

    tokens: tuple[int, ...]
    score: float
    times: tuple[int, ...] = ()
    token_log_probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class AudioChunk:
    """One request: a piece of one stream. `parameters` count on the first piece only."""

    stream_id: StreamId
    samples_S: Samples
    is_first: bool = False
    is_last: bool = False
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    wants_result: bool = False
    # From PCM16: finite and inside [-1, 1] by construction.
    is_pcm16: bool = False
    is_cancelled: Callable[[], bool] = _never


@dataclass(frozen=True)
class ChunkResult:
    """The answer to one request: the text so far, or an error that concerns this request alone.

    `document` is the RESULT output, built only when the request asked for it.
    """

    text: str = ""
    document: Mapping[str, Any] | None = None
    error: OasrError | None = None
