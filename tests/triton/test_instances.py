"""A live `oasr-serve` with two instances of the shipped model, as machines of many cores have."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc

from benchmarks.load.prometheus import Metrics
from oasr_backend.serve.group import running_in_group
from oasr_backend.serve.ports import bind_error, find_free_ports
from oasr_backend.serve.shm import leftover_regions
from tests.guards import GUARD_S, wait_until
from tests.triton.conftest import Pcm16
from tests.triton.wire import audio, sequence, text_of

OASR_SERVE = Path(sys.executable).parent / "oasr-serve"
FLAGS = ("--http-port", "--grpc-port", "--metrics-port")
INSTANCES = {"oasr_streaming_0_0", "oasr_streaming_0_1"}
CHUNK_SAMPLES = 10_240
OPENED = "oasr_streams_opened_total"


@contextlib.contextmanager
def _serving(ports: list[int]) -> Iterator[subprocess.Popen[str]]:
    command = [str(OASR_SERVE), "--host", "127.0.0.1", "--device", "cpu", "--instances", "2"]
    command += [f"{flag}={port}" for flag, port in zip(FLAGS, ports, strict=True)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready: ")
            yield process
        finally:
            process.kill()


def _opened(metrics_port: int) -> dict[str, float]:
    """Streams that each instance has opened, as published a moment ago."""
    metrics = Metrics.fetch(f"http://127.0.0.1:{metrics_port}/metrics")
    return metrics.by_label(OPENED, "instance")


def _texts(url: str, recordings: list[Pcm16]) -> list[str]:
    """The final texts of streams that are all open at once and send their chunks by turns."""
    pieces = [
        np.array_split(pcm, range(CHUNK_SAMPLES, len(pcm), CHUNK_SAMPLES)) for pcm in recordings
    ]
    texts = [""] * len(pieces)
    with tritonclient.grpc.InferenceServerClient(url) as client:
        for turn in range(max(map(len, pieces))):
            for number, stream in enumerate(pieces):
                if turn < len(stream):
                    flags = ("S" if turn == 0 else "") + ("E" if turn == len(stream) - 1 else "")
                    tensors = audio(tritonclient.grpc, stream[turn])
                    options = sequence(1 + number, flags)
                    texts[number] = text_of(client.infer("oasr_streaming", tensors, **options))
    return texts


def _children(process_id: int) -> Iterator[int]:
    """Each process that oasr-serve starts begins a group of its own."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        # A process may end while its file is read.
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == process_id:
                yield int(entry.parent.name)


def _regions_of(process_id: int) -> list[str]:
    return [path.name for path in leftover_regions("oasr_") if f"_{process_id}_" in path.name]


def test_both_instances_serve_and_stop_with_nothing_left_behind(
    recordings: list[Pcm16], expected: list[str]
) -> None:
    ports = find_free_ports(3)
    with _serving(ports) as process:
        groups = list(_children(process.pid))
        # tritonserver with a process for each instance, and the guard.
        assert sum(len(running_in_group(group)) for group in groups) == 1 + len(INSTANCES) + 1
        assert _regions_of(process.pid)
        assert _texts(f"127.0.0.1:{ports[1]}", recordings) == expected
        wait_until(
            lambda: sum(_opened(ports[2]).values()) == len(recordings), what="all are counted"
        )
        opened = _opened(ports[2])
        assert set(opened) == INSTANCES
        assert min(opened.values()) > 0
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=GUARD_S)
        assert process.returncode == 0
    assert "note: oasr_streaming has 2 instances, where its config.pbtxt says 1" in errors
    assert _regions_of(process.pid) == []
    assert [running_in_group(group) for group in groups] == [[] for _ in groups]
    assert all(bind_error("127.0.0.1", port) is None for port in ports)
