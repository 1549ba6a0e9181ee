"""What Triton's shell calls: the life of one model instance. Load, execute, reap, report, unload.

A service is one kind of model. That of streams needs sequences; one that needs none fits beside it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from oasr_backend.compiled import GraphFiles
from oasr_backend.metrics import Reading, heartbeat
from oasr_backend.streaming.assemble import awaits_graph
from oasr_backend.streaming.requests import Pending
from oasr_backend.triton_backend.backlog import Backlog
from oasr_backend.triton_backend.graph_maker import GraphMaker
from oasr_backend.triton_backend.io import (
    WARMUP_IDS,
    answer_now,
    is_warmup,
    read_chunk,
    write_response,
)
from oasr_backend.triton_backend.load import load_engine, read_config
from oasr_backend.triton_backend.log import log_to_stderr
from oasr_backend.triton_backend.periodic import Periodic
from oasr_backend.triton_backend.publisher import MetricsPublisher
from oasr_backend.triton_backend.startup import LoadTimes, settle_memory
from oasr_backend.types import AudioChunk, ChunkResult

logger = logging.getLogger(__name__)

_HOUSEKEEPING_INTERVAL_S = 1.0
#: Of the counts that have changed a few are told at a time, each by a round trip to the server.
_PUBLISHING_INTERVAL_S = 0.2
#: On a GPU `execute` takes the steps of an END, which are three, and more for so long. The backlog
#: finishes what lasts longer: no stream waits for another's minute of audio.
#: An answer of the backlog costs a round trip to the server, one in the list of answers does not:
#: on a CPU, where a step of few rows lasts longer than that, the backlog takes all steps.
_EXECUTE_STEPS = 3
_EXECUTE_BUDGET_S = 0.02
#: Asking whether a request is cancelled is a round trip to the server. A list longer than this is
#: not asked: the idle limit then frees the streams of callers that have gone away.
_MOST_CANCEL_CHECKS = 16


class Service(Protocol):
    """What the shell of a model in a repository, its `model.py`, delegates to."""

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request, in order; None for one that is answered by its sender."""

    def is_ready(self) -> bool:
        """Whether Triton may send requests to this instance."""

    def close(self) -> None:
        """Answers what is still open and frees what the instance holds."""


class StreamingService:
    """Speech as sequences of chunks. One engine per instance, one instance per GPU."""

    def __init__(self, args: Mapping[str, str]) -> None:
        """`args` are those of Triton's `initialize`. Raises ConfigError; the load then fails."""
        times = LoadTimes()
        times.end("import")
        # What the imports made stays; the collector need not walk it with what the load leaves.
        gc.freeze()
        config = read_config(args)
        log_to_stderr(config.server.log_level)
        # A first start does not wait for the graph, unless none could ever be kept.
        may_export = not GraphFiles().is_writable
        self._engine = load_engine(args, config, on_stage=times.end, may_export=may_export)
        self._defaults = self._engine.parts.admission.defaults
        self._backlog = Backlog(self._engine)
        self._steps_here = self._engine.store.device.type != "cpu"
        self._is_unloaded = False
        labels = {"model": args["model_name"], "instance": args["model_instance_name"]}
        self._publisher = MetricsPublisher(self._readings, labels)
        self._housekeeping = Periodic(
            (self._engine.close_idle,), interval_s=_HOUSEKEEPING_INTERVAL_S
        )
        self._publisher.publish()
        self._publishing = Periodic(
            (self._publisher.publish_some,), interval_s=_PUBLISHING_INTERVAL_S
        )
        _quiet_garbage_collection()
        times.end("settle")
        self._graph_maker = GraphMaker(args, self._engine) if awaits_graph(self._engine) else None
        logger.info("event=load_times %s", times)
        logger.info(
            "event=model_ready checkpoint=%s device=%s max_streams=%d",
            config.model.resolve_checkpoint(Path(args["model_repository"])),
            self._engine.store.device,
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
        batch, early = self._engine.submit(chunks), set[int]()
        if self._steps_here:
            early = self._answer_refusals(requests, batch)
            self._step_for(batch)
        answers, left = list[Any](), list[tuple[Pending, Any]]()
        for index, (request, pending) in enumerate(zip(requests, batch, strict=True)):
            # Looked at once: the backlog's steps may finish it at any time.
            result = None if index in early else pending.result
            answers.append(None if result is None else _response(pending, result))
            if result is None and index not in early:
                left.append((pending, request.get_response_sender()))
        if left:
            self._backlog.add(left)
        return answers

    def _execute_beside_warmups(
        self, requests: Sequence[Any], chunks: Sequence[AudioChunk]
    ) -> list[Any]:
        live = [index for index, chunk in enumerate(chunks) if not is_warmup(chunk)]
        own = self._execute([requests[index] for index in live], [chunks[index] for index in live])
        answers = [write_response(ChunkResult()) for _ in requests]
        for index, answer in zip(live, own, strict=True):
            answers[index] = answer
        return answers

    def _step_for(self, batch: Sequence[Pending]) -> None:
        """Steps until the requests are done or have taken what one `execute` may."""
        deadline_s, num_steps = time.monotonic() + _EXECUTE_BUDGET_S, 0
        while not all(pending.is_done for pending in batch):
            if num_steps >= _EXECUTE_STEPS and time.monotonic() > deadline_s:
                break
            self._engine.step()
            num_steps += 1

    def is_ready(self) -> bool:
        return self._engine.is_healthy

    def close(self) -> None:
        if self._graph_maker is not None:
            self._graph_maker.stop()
        self._housekeeping.stop()
        self._publishing.stop()
        self._engine.close()
        self._backlog.stop()
        self._is_unloaded = True
        self._publisher.publish()

    def _readings(self) -> list[Reading]:
        beat = heartbeat(self._engine.step_age_s, is_unloaded=self._is_unloaded)
        return [beat, *self._engine.readings()]

    def _answer_refusals(self, requests: Sequence[Any], batch: Sequence[Pending]) -> set[int]:
        """Sends what needs no step, where others in the list do: a refusal comes at once."""
        if all(pending.is_done for pending in batch):
            return set()
        early = {index for index, pending in enumerate(batch) if _is_refused(pending)}
        for index in early:
            answer_now(requests[index].get_response_sender(), batch[index].result)
        return early


def _quiet_garbage_collection() -> None:
    """Keeps the collector off what lives as long as the model: walking it stalls every stream."""
    settle_memory()
    gc.set_threshold(10_000, 20, 20)
    # The shell of a model may have turned it off for its imports.
    gc.enable()


def _is_refused(pending: Pending) -> bool:
    return pending.result is not None and pending.result.error is not None


def _response(pending: Pending, result: ChunkResult) -> Any:
    return write_response(result, wants_text=pending.request.wants_text)
