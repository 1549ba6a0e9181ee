"""The life of one model instance inside Triton: load, execute, reap, report, unload."""

from __future__ import annotations

import gc
import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oasr_backend.metrics import Sample, heartbeat
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.turns import Turn
from oasr_backend.triton_backend.io import (
    WARMUP_IDS,
    MetricsPublisher,
    answer_now,
    is_warmup,
    read_chunk,
    write_response,
)
from oasr_backend.triton_backend.load import load_engine, read_config
from oasr_backend.types import AudioChunk, ChunkResult

logger = logging.getLogger(__name__)

_HOUSEKEEPING_INTERVAL_S = 1.0
_PUBLISHING_INTERVAL_S = 0.05
#: `execute` takes the steps of an END, which are three, and more while so much time has not passed.
#: What lasts longer is finished by the backlog, so that nobody waits for another's minute of audio.
#: An answer of the backlog costs a round trip to the server, one in the list of answers does not.
_EXECUTE_STEPS = 3
_EXECUTE_BUDGET_S = 0.02
#: Asking whether a request is cancelled is a round trip to the server. A list longer than this is
#: not asked: whoever has gone away is then freed by the idle limit.
_MOST_CANCEL_CHECKS = 16


class TritonModel:
    """What `model.py` delegates to. One engine per instance, one instance per GPU."""

    def __init__(self, args: Mapping[str, str]) -> None:
        """`args` are those of Triton's `initialize`. Raises ConfigError; the load then fails."""
        config = read_config(args)
        _log_to_stderr(config.server.log_level)
        self._engine = load_engine(args, config)
        self._defaults = self._engine.config.defaults
        self._backlog = Backlog(self._engine)
        self._is_unloaded = False
        labels = {"model": args["model_name"], "instance": args["model_instance_name"]}
        self._publisher = MetricsPublisher(self._samples, labels)
        self._housekeeping = Periodic(
            (self._engine.close_idle,), interval_s=_HOUSEKEEPING_INTERVAL_S
        )
        self._publisher.publish()
        self._publishing = Periodic(
            (self._publisher.publish_some,), interval_s=_PUBLISHING_INTERVAL_S
        )
        _quiet_garbage_collection()
        logger.info(
            "event=model_ready checkpoint=%s device=%s max_streams=%d",
            config.model.resolve_checkpoint(Path(args["model_repository"])),
            self._engine.caches.config.device,
            self._engine.config.step.max_streams,
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One entry per request, in order; None where the backlog answers later."""
        asks_cancelled = len(requests) <= _MOST_CANCEL_CHECKS
        chunks = [
            read_chunk(request, self._defaults, asks_cancelled=asks_cancelled)
            for request in requests
        ]
        if not WARMUP_IDS.isdisjoint([chunk.stream_id for chunk in chunks]):
            return self._execute_beside_warmups(requests, chunks)
        return self._execute(requests, chunks)

    def _execute(self, requests: Sequence[Any], chunks: Sequence[AudioChunk]) -> list[Any]:
        turns = self._engine.submit(chunks)
        early = self._answer_refusals(requests, turns)
        self._step_for(turns)
        return [
            None if index in early else self._respond(request, turn)
            for index, (request, turn) in enumerate(zip(requests, turns, strict=True))
        ]

    def _execute_beside_warmups(
        self, requests: Sequence[Any], chunks: Sequence[AudioChunk]
    ) -> list[Any]:
        live = [index for index, chunk in enumerate(chunks) if not is_warmup(chunk)]
        own = self._execute([requests[index] for index in live], [chunks[index] for index in live])
        answers = [write_response(ChunkResult()) for _ in requests]
        for index, answer in zip(live, own, strict=True):
            answers[index] = answer
        return answers

    def _step_for(self, turns: Sequence[Turn]) -> None:
        """Steps until the turns are done or have taken what one `execute` may."""
        deadline_s, num_steps = time.monotonic() + _EXECUTE_BUDGET_S, 0
        while not all(turn.is_done for turn in turns):
            if num_steps >= _EXECUTE_STEPS and time.monotonic() > deadline_s:
                break
            self._engine.step()
            num_steps += 1

    def is_ready(self) -> bool:
        return self._engine.is_healthy

    def close(self) -> None:
        self._housekeeping.stop()
        self._publishing.stop()
        self._engine.close()
        self._backlog.stop()
        self._is_unloaded = True
        self._publisher.publish()

    def _samples(self) -> list[Sample]:
        beat = heartbeat(self._engine.step_age_s, is_unloaded=self._is_unloaded)
        return [beat, *self._engine.samples()]

    def _answer_refusals(self, requests: Sequence[Any], turns: Sequence[Turn]) -> set[int]:
        """Sends what needs no step, where others in the list do: a refusal comes at once."""
        if all(turn.is_done for turn in turns):
            return set()
        early = {index for index, turn in enumerate(turns) if _is_refused(turn)}
        for index in early:
            answer_now(requests[index].get_response_sender(), turns[index].result)
        return early

    def _respond(self, request: Any, turn: Turn) -> Any:
        if turn.result is not None:
            return write_response(turn.result, wants_text=turn.request.wants_text)
        self._backlog.add(turn, request.get_response_sender())
        return None


class Backlog:
    """Steps and answers, on its own thread, the turns that outlast the `execute` they came in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: list[tuple[Turn, Any]] = []
        self._wakeup = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="oasr-backlog", daemon=True)
        self._thread.start()

    def add(self, turn: Turn, sender: Any) -> None:
        with self._wakeup:
            self._open.append((turn, sender))
            self._wakeup.notify()

    def stop(self) -> None:
        """Returns once every turn is answered; close the engine first, so that each of them is."""
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
        for turn, sender in done:
            try:
                answer_now(sender, turn.result, wants_text=turn.request.wants_text)
            except Exception as error:
                logger.error(
                    "event=answer_failed stream=%r", turn.request.stream_id, exc_info=error
                )

    def _wait(self) -> bool:
        with self._wakeup:
            while not self._open and not self._is_stopped:
                self._wakeup.wait()
            return bool(self._open)


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


def _quiet_garbage_collection() -> None:
    """Keeps the collector off what lives as long as the model: walking it stalls every stream."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _is_refused(turn: Turn) -> bool:
    return turn.result is not None and turn.result.error is not None


def _log_to_stderr(level: str) -> None:
    """The server's log, without a round trip to its process for every line.

    UTF-8 whatever the locale: whoever looks for the id of a stream finds it as it was sent.
    """
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    package_logger = logging.getLogger("oasr_backend")
    package_logger.setLevel(level.upper())
    package_logger.handlers = [handler]
    package_logger.propagate = False
