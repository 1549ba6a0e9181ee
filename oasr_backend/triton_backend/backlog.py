"""Requests that are answered behind the `execute` that brought them, each as its step lands."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.requests import Pending
from oasr_backend.triton_backend.io import answer_now

logger = logging.getLogger(__name__)


class Backlog:
    """Steps and answers on threads of its own, one for each step that may go on at once.

    Where several are idle they divide what has come: no caller waits for the rows of others.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: list[tuple[Pending, Any]] = []
        self._wakeup = threading.Condition()
        self._is_stopped = False
        # Grows when something new is there to do.
        self._turn = 0
        self._num_idle = 0
        num_threads = engine.config.step.steps_at_once
        self._threads = [
            threading.Thread(target=self._run, name=f"oasr-backlog-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, requests: Sequence[tuple[Pending, Any]]) -> None:
        """Requests that were submitted, each with the sender of its answer."""
        with self._wakeup:
            self._open += requests
            self._next_turn(len(requests))

    def stop(self) -> None:
        """Returns once every request is answered; close the engine first, so that each one is."""
        with self._wakeup:
            self._is_stopped = True
            self._wakeup.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        seen = -1
        while (shares := self._wait_past(seen)) is not None:
            seen = self._turn
            if num_left := self._engine.step(shares=shares).num_left:
                with self._wakeup:
                    self._next_turn(num_left)
            # A function of its own: names that outlive it would hold audio until more comes.
            self._answer()

    def _next_turn(self, num_ready: int) -> None:
        """Wakes as many threads as there are streams to step, if so many are idle."""
        self._turn += 1
        self._wakeup.notify(num_ready)

    def _wait_past(self, seen: int) -> int | None:
        """Waits for a turn that has not been looked at in vain.

        Returns how many threads divide the work, this one among them; None: it is over.
        """
        with self._wakeup:
            self._num_idle += 1
            self._wakeup.wait_for(lambda: self._is_over or (self._open and self._turn != seen))
            shares = self._num_idle
            self._num_idle -= 1
            return None if self._is_over else shares

    @property
    def _is_over(self) -> bool:
        return self._is_stopped and not self._open

    def _answer(self) -> None:
        with self._wakeup:
            done = [entry for entry in self._open if entry[0].is_done]
            self._open = [entry for entry in self._open if not entry[0].is_done]
            if self._is_over:
                self._wakeup.notify_all()
        for pending, sender in done:
            try:
                answer_now(sender, pending.result, wants_text=pending.request.wants_text)
            except Exception as error:
                logger.error(
                    "event=answer_failed stream=%r", pending.request.stream_id, exc_info=error
                )
