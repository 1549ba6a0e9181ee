"""The engine behind a real tritonserver, driven by perf_analyzer over gRPC.

Closed loop measures capacity, in turns with the engine in process at as many streams. Paced, every
stream sends a chunk each 640 ms as live audio does: this measures latency. Server, perf_analyzer
and this program share the machine's cores.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine import chosen_engine, measure_rate
from benchmarks.perf_analyzer import PERCENTILES, Load, Outcome, run_load
from benchmarks.perf_input import write_input
from benchmarks.report import Figure, Report
from benchmarks.workload import (
    CHUNK_S,
    MODEL_NAME,
    MODEL_REPOSITORY,
    Options,
    utterances,
)
from oasr_backend.errors import ServerError
from oasr_backend.serve.process import TritonServer, local_settings

TARGET_SHARE = 0.6
NUM_STREAMS = {"cpu": 32, "cuda": 512}
_MEASURE_S = 4.0
_MAX_REPEATS = 3
_READY_TIMEOUT_S = 600
# perf_analyzer leaves the streams that are live when it ends; the server frees them after this.
_IDLE_TIMEOUT_S = 8
_REAP_TIMEOUT_S = 600
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def run(options: Options) -> Report:
    """Raises ServerError for a failed request, and for streams or blocks that stay held."""
    num_streams = NUM_STREAMS["cpu" if options.device == "cpu" else "cuda"]
    seconds = 1.0 if options.quick else _MEASURE_S
    audio = utterances(quick=options.quick)
    engine = chosen_engine(options, num_streams=num_streams)
    closed: list[Outcome] = []
    paced: list[Outcome] = []
    in_process: list[float] = []
    with _served(options) as server, tempfile.TemporaryDirectory() as folder:
        input_data = Path(folder) / "input.json"
        write_input(input_data, audio)
        for _ in range(min(options.num_repeats, _MAX_REPEATS)):
            in_process.append(measure_rate(engine, audio, num_streams=num_streams, options=options))
            for outcomes, chunk_s in ((closed, None), (paced, CHUNK_S)):
                load = Load(num_streams, seconds, chunk_s)
                outcomes.append(checked_load(server, load, input_data))
    configuration = {
        "checkpoint": options.model.name,
        "device": options.device,
        "threads_in_process": options.num_threads,
        "streams": num_streams,
        "chunk_s": CHUNK_S,
        "protocol": "grpc",
        "input": "WAV",
    }
    return Report("server", configuration, _figures(in_process, closed, paced, num_streams))


def checked_load(server: TritonServer, load: Load, input_data: Path) -> Outcome:
    """Runs a load, then waits until all that it opened is free again."""
    failures = metric_sum(server, "nv_inference_request_failure")
    outcome = run_load(server.grpc_url, MODEL_NAME, load, input_data=input_data)
    num_errors = outcome.num_errors + metric_sum(server, "nv_inference_request_failure") - failures
    if num_errors:
        raise ServerError(f"{num_errors:g} of {outcome.num_requests} requests failed under {load}")
    wait_until_free(server)
    return outcome


def wait_until_free(server: TritonServer, timeout_s: float = _REAP_TIMEOUT_S) -> None:
    """Raises ServerError when streams or blocks are still held after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    names = ("oasr_active_streams", "oasr_used_blocks")
    while any(held := [metric_sum(server, name) for name in names]):
        if time.monotonic() > deadline_s:
            raise ServerError(f"after {timeout_s:g} s {dict(zip(names, held, strict=True))}")
        time.sleep(0.5)


def metric_sum(server: TritonServer, name: str) -> float:
    """The sum of a metric over its labels. Raises ServerError when the server lacks it."""
    with _OPENER.open(server.metrics_url, timeout=10) as response:
        text = response.read().decode("utf-8")
    values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    if not values:
        raise ServerError(f"{server.metrics_url} has no metric {name}")
    return sum(map(float, values))


@contextlib.contextmanager
def _served(options: Options) -> Iterator[TritonServer]:
    """The model of the options, with idle times short enough to see streams being given back."""
    with tempfile.TemporaryDirectory(prefix="oasr-bench-") as folder:
        repository = Path(folder)
        source, model = MODEL_REPOSITORY / MODEL_NAME, repository / MODEL_NAME
        shutil.copytree(source / "1", model / "1", ignore=shutil.ignore_patterns("__pycache__"))
        config = (source / "config.pbtxt").read_text(encoding="utf-8")
        idle = f"max_sequence_idle_microseconds: {(_IDLE_TIMEOUT_S - 3) * 1_000_000}"
        config = re.sub(r"max_sequence_idle_microseconds: \d+", idle, config)
        (model / "config.pbtxt").write_text(config, encoding="utf-8")
        overrides = {
            **{name: str(value) for name, value in options.settings.items()},
            "checkpoint_dir": str(options.model.directory().resolve()),
            "device": options.device,
            "stream_idle_timeout_s": str(_IDLE_TIMEOUT_S),
        }
        with TritonServer(local_settings(repository, overrides=overrides)) as server:
            server.wait_ready(_READY_TIMEOUT_S)
            yield server


def _figures(
    in_process: list[float], closed: list[Outcome], paced: list[Outcome], num_streams: int
) -> list[Figure]:
    served = [outcome.requests_per_s * CHUNK_S for outcome in closed]
    shares = [ours / alone for ours, alone in zip(served, in_process, strict=True)]
    asked = num_streams / CHUNK_S
    reached = [outcome.requests_per_s / asked for outcome in paced]
    return [
        Figure(f"in process, {num_streams} streams", "audio s/s", in_process),
        Figure(f"served, closed loop, {num_streams} streams", "audio s/s", served),
        Figure("served / in process", "x", shares, target=TARGET_SHARE),
        *_latencies("closed loop", closed),
        Figure(f"paced, {num_streams} streams: rate reached / asked", "x", reached),
        *_latencies("paced", paced),
    ]


def _latencies(name: str, outcomes: list[Outcome]) -> list[Figure]:
    return [
        Figure(f"{name}: latency p{p}", "ms", [outcome.latency_ms[p] for outcome in outcomes])
        for p in PERCENTILES
    ]
