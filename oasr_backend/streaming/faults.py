"""Whom a fault of a step concerns, and whether the device will ever work again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oasr_backend.errors import DeviceLostError, StepFailedError
from oasr_backend.streaming.runner import is_device_lost
from oasr_backend.streaming.streams import Stream

logger = logging.getLogger(__name__)


class Faults:
    """Marks streams of failed steps; `lost` is set once the device has failed for good."""

    def __init__(self) -> None:
        self.lost: DeviceLostError | None = None

    @contextmanager
    def failing(self, streams: Sequence[Stream]) -> Iterator[None]:
        """What goes wrong inside ends these streams and no others."""
        try:
            yield
        except Exception as error:
            self.fail(streams, error)

    def fail(self, streams: Sequence[Stream], error: Exception) -> None:
        """Marks the streams of a failed step, whose rows may be half-written.

        They are closed when the device is through with them: until then no stream gets the rows.
        """
        logger.error("event=step_failed streams=%d", len(streams), exc_info=error)
        if is_device_lost(error):
            self.lost = DeviceLostError(
                f"the device failed ({error}); this instance answers nothing until it is restarted"
            )
        for stream in streams:
            stream.failure = self.lost or StepFailedError(
                f"stream {stream.stream_id!r} ends: its step failed ({error}); send START again"
            )
            stream.audio.discard()
