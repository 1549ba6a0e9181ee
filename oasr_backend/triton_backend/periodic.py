"""What an instance does beside its requests, by the clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class Periodic:
    """Calls `actions` every `interval_s` on a background thread until stopped."""

    def __init__(self, actions: Sequence[Callable[[], object]], *, interval_s: float) -> None:
        self._actions = actions
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oasr-housekeeping", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            for action in self._actions:
                try:
                    action()
                except Exception:
                    logger.exception("event=housekeeping_failed action=%r", action)
