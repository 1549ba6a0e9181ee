"""A log line for each refusal, but no flood of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from oasr_backend.errors import OasrError
from oasr_backend.types import StreamId

logger = logging.getLogger(__name__)

_MOST_A_SECOND = 20


class RefusalLog:
    """Writes so many lines a second at most, and with the next second how many it left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second = 0
        self._num_noted = 0

    def note(self, stream_id: StreamId, error: OasrError) -> None:
        second = int(self._clock())
        if second != self._second:
            self._begin(second)
        self._num_noted += 1
        if self._num_noted <= _MOST_A_SECOND:
            kind = type(error).__name__
            logger.warning("event=request_refused stream=%r error=%s: %s", stream_id, kind, error)

    def _begin(self, second: int) -> None:
        num_left_out = self._num_noted - _MOST_A_SECOND
        if num_left_out > 0:
            logger.warning("event=refusals_not_logged count=%d", num_left_out)
        self._second, self._num_noted = second, 0
