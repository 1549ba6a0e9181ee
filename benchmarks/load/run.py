"""One run of N streams: processes, the measuring window, the server's side, the report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import grpc  # type: ignore[import-untyped]

from benchmarks.load.prometheus import HistogramChange, Metrics, gain
from benchmarks.load.statistics import summary_ms
from benchmarks.load.utterances import Utterance
from benchmarks.load.worker import (
    LoadError,
    Samples,
    Window,
    WorkerPlan,
    run_worker,
    solo_texts,
)

logger = logging.getLogger(__name__)

_START_MARGIN_S = 0.5
_READY_TIMEOUT_S = 600.0
#: Fractions of it spread any number of points evenly, whatever their count.
_GOLDEN_RATIO = 0.6180339887498949
_RUN_ID_BITS, _STREAM_ID_BITS = 22, 40
_COUNTERS = (
    "oasr_streams_opened_total", "oasr_streams_reaped_total", "oasr_conflicts_total",
    "oasr_rejected_total", "oasr_audio_seconds_total", "oasr_compute_seconds_total",
    "nv_inference_request_success", "nv_inference_request_failure", "nv_inference_exec_count",
)  # fmt: skip


@dataclass(frozen=True)
class LoadSettings:
    """Streams begin within `ramp_s`, evenly spread; with 0 all send at the same instants."""

    url: str
    metrics_url: str | None = None
    model_name: str = "oasr_streaming"
    num_streams: int = 100
    seconds: float = 30.0
    num_processes: int = 2
    channels_per_process: int = 4
    ramp_s: float = 0.0
    settle_s: float = 2.0
    deadline_s: float = 30.0
    # One streaming call for each audio stream, rather than a call for each request.
    is_streaming: bool = False


def run_load(settings: LoadSettings, utterances: Sequence[Utterance]) -> dict[str, Any]:
    """A JSON-ready report. Raises LoadError when a process ends early."""
    with _workers(settings, utterances) as pipes:
        start_s = time.monotonic() + _START_MARGIN_S
        measure_from_s = start_s + settings.ramp_s + settings.settle_s
        window = Window(start_s, measure_from_s, measure_from_s + settings.seconds)
        for pipe in pipes:
            pipe.send(window)
        before = _read_metrics_at(window.measure_from_s, settings.metrics_url)
        after = _read_metrics_at(window.stop_s, settings.metrics_url)
        samples = Samples()
        for pipe in pipes:
            samples.add(_receive(pipe, settings.deadline_s * 2))
    return {
        **_client_report(settings, samples),
        "server": _server_report(before, after),
        "machine": _machine(),
    }


def derive_expected(settings: LoadSettings, utterances: Sequence[Utterance]) -> dict[str, str]:
    """The texts of one stream alone on the server. Raises LoadError when it refuses."""
    try:
        return asyncio.run(
            solo_texts(
                settings.url,
                settings.model_name,
                utterances,
                first_id=_new_run_id(),
                deadline_s=settings.deadline_s,
            )
        )
    except grpc.aio.AioRpcError as error:
        raise LoadError(f"the solo pass failed: {error.code().name}: {error.details()}") from error


@contextlib.contextmanager
def _workers(settings: LoadSettings, utterances: Sequence[Utterance]) -> Iterator[list[Connection]]:
    """Connected and ready processes; none outlives the block."""
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for plan in _plans(settings, utterances):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=run_worker, args=(plan, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            _receive(pipe, _READY_TIMEOUT_S)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _plans(settings: LoadSettings, utterances: Sequence[Utterance]) -> list[WorkerPlan]:
    first_id = _new_run_id()
    num_processes = max(1, min(settings.num_processes, settings.num_streams))
    plans = []
    for process in range(num_processes):
        indices = range(process, settings.num_streams, num_processes)
        plans.append(
            WorkerPlan(
                url=settings.url,
                model_name=settings.model_name,
                utterances=utterances,
                stream_indices=indices,
                start_offsets_s=[(i * _GOLDEN_RATIO) % 1.0 * settings.ramp_s for i in indices],
                first_id=first_id,
                deadline_s=settings.deadline_s,
                num_channels=settings.channels_per_process,
                is_streaming=settings.is_streaming,
            )
        )
    return plans


def _new_run_id() -> int:
    """Ids of two runs never meet: the next stream's ids follow from a random start."""
    return (1 + secrets.randbits(_RUN_ID_BITS)) << _STREAM_ID_BITS


def _receive(pipe: Connection, timeout_s: float) -> Any:
    try:
        if pipe.poll(timeout_s):
            return _checked(pipe.recv())
    except EOFError:
        raise LoadError("a load process ended early; its output above says why") from None
    raise LoadError(f"a load process gave no sign for {timeout_s:g} s; use more processes")


def _checked(message: Any) -> Any:
    if isinstance(message, LoadError):
        raise message
    return message


def _read_metrics_at(instant_s: float, url: str | None) -> Metrics:
    time.sleep(max(0.0, instant_s - time.monotonic()))
    if url is None:
        return Metrics({})
    try:
        return Metrics.fetch(url)
    except OSError as error:
        logger.warning("no metrics from %s (%s); the report lacks the server's side", url, error)
        return Metrics({})


def _client_report(settings: LoadSettings, samples: Samples) -> dict[str, Any]:
    requests = max(1, samples.num_requests)
    return {
        "kind": "load",
        "settings": asdict(settings),
        "streams": settings.num_streams,
        "latency_ms": {
            "first_partial": summary_ms(samples.first_partial_s),
            "chunk": summary_ms(samples.chunk_s),
            "last_chunk_to_final": summary_ms(samples.final_s),
        },
        "throughput": {
            "intended_audio_s_per_s": settings.num_streams,
            "reached_audio_s_per_s": round(samples.answered_audio_s / settings.seconds, 2),
            "requests_per_s": round(samples.num_requests / settings.seconds, 2),
        },
        "errors": dict(samples.errors),
        "texts": {
            "finished": samples.num_texts,
            "compared": samples.num_compared,
            "wrong": samples.num_wrong,
            "wrong_examples": samples.wrong_examples,
        },
        "client": {
            "cpu_cores_used": round(samples.cpu_s / settings.seconds, 3),
            "cpu_us_per_request": round(1e6 * samples.cpu_s / requests, 1),
            "schedule_slip_ms": summary_ms(samples.slip_s),
        },
    }


def _server_report(before: Metrics, after: Metrics) -> dict[str, Any]:
    """The server's counts within the window; None for counts that it does not publish."""
    counters = {name: gain(before, after, name) for name in _COUNTERS}
    requests, executions = (
        counters["nv_inference_request_success"], counters["nv_inference_exec_count"],
    )  # fmt: skip
    return {
        "counters": counters,
        "requests_per_execution": round(requests / executions, 2)
        if requests and executions
        else None,
        "step_width": _histogram(before, after, "oasr_step_width"),
        "step_seconds": _histogram(before, after, "oasr_step_seconds"),
    }


def _histogram(before: Metrics, after: Metrics, name: str) -> dict[str, Any] | None:
    change = HistogramChange.between(before, after, name)
    if change is None:
        return None
    counts = {bound: count for bound, count in change.counts.items() if count}
    return {"mean": change.mean, "count": change.count, "counts_by_upper_bound": counts}


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
