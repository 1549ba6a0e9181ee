"""Requests whose decoding outlasts the `execute` that brought them."""

from __future__ import annotations

import logging
import threading
from typing import Any

from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.requests import Pending
from oasr_backend.triton_backend.io import answer_now

logger = logging.getLogger(__name__)


class Backlog:
    """Steps and answers, on its own thread, requests that outlast the `execute` they came in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: list[tuple[Pending, Any]] = []
        self._wakeup = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="oasr-backlog", daemon=True)
        self._thread.start()

    def add(self, pending: Pending, sender: Any) -> None:
        with self._wakeup:
            self._open.append((pending, sender))
            self._wakeup.notify()

    def stop(self) -> None:
        """Returns once every request is answered; close the engine first, so that each one is."""
        with self._wakeup:
            self._is_stopped = True
            self._wakeup.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            self._engine.step()
            # A function of its own: names that outlive it would hold audio until more comes.
            self._answer()

    def _answer(self) -> None:
        with self._wakeup:
            done = [entry for entry in self._open if entry[0].is_done]
            self._open = [entry for entry in self._open if not entry[0].is_done]
        for pending, sender in done:
            try:
                answer_now(sender, pending.result, wants_text=pending.request.wants_text)
            except Exception as error:
                logger.error(
                    "event=answer_failed stream=%r", pending.request.stream_id, exc_info=error
                )

    def _wait(self) -> bool:
        with self._wakeup:
            while not self._open and not self._is_stopped:
                self._wakeup.wait()
            return bool(self._open)
