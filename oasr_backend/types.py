"""What the layers hand to each other. Torch-free, immutable, built whole.

Named tuples, since thousands of each are made a second and frozen dataclasses take five times as
long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oasr_backend.errors import OasrError
from oasr_backend.options import StreamOptions

#: A Triton correlation id. The integer 42 and the string "42" are two streams.
StreamId = int | str
#: Mono audio, float32 in [-1, 1].
Samples = npt.NDArray[np.float32]
#: Mono 16-bit PCM. It stays that until a window is cut, since it is half of the memory to move.
Pcm16 = npt.NDArray[np.int16]


def never() -> bool:
    """What is asked of a request that cannot be cancelled."""
    return False


class Hypothesis(NamedTuple):
    """One decoded token sequence. `times` are the encoder frames at which the tokens appear.

    `token_log_probs` are the acoustic log-probs of the tokens at their best frame.
    """

    tokens: tuple[int, ...]
    score: float
    times: tuple[int, ...] = ()
    token_log_probs: tuple[float, ...] = ()

    def first(self, count: int) -> Hypothesis:
        """Its first `count` tokens, under the score of the whole."""
        return self._part(slice(count))

    def without_first(self, count: int) -> Hypothesis:
        """What follows its first `count` tokens, under the score of the whole."""
        return self._part(slice(count, None))

    def _part(self, part: slice) -> Hypothesis:
        return Hypothesis(
            self.tokens[part], self.score, self.times[part], self.token_log_probs[part]
        )


class AudioChunk(NamedTuple):
    """One request: a piece of one stream.

    `samples_S` is handed over: it is kept, not copied, and is not written to afterwards.
    """

    stream_id: StreamId
    samples_S: Samples | Pcm16
    is_first: bool = False
    is_last: bool = False
    # Of the first piece; None: the server's defaults. Later pieces bring none.
    options: StreamOptions | None = None
    # Its number in the stream, where the client counts.
    chunk_seq: int | None = None
    wants_text: bool = True
    wants_result: bool = False
    is_cancelled: Callable[[], bool] = never
    # Why the request cannot be read; it then brings no samples.
    fault: OasrError | None = None

    @property
    def is_pcm16(self) -> bool:
        return self.samples_S.dtype == np.int16


class ChunkResult(NamedTuple):
    """The answer to one request: the text so far, or an error that concerns this request alone.

    `document` is the RESULT output, built only when the request asked for it.
    """

    text: str = ""
    document: Mapping[str, Any] | None = None
    error: OasrError | None = None
