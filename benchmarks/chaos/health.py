"""The figures that show a leak: open streams, free blocks, resident memory, shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.server import MODEL_NAME
from benchmarks.load.prometheus import Metrics
from oasr_backend.serve.group import running_in_group
from oasr_backend.serve.process import TritonServer
from oasr_backend.serve.shm import leftover_regions

_RSS = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)
_MAX_SLOPE_SAMPLES = 200
_STALL_EVERY_S = (3.0, 9.0)
_STALL_S = (0.1, 0.8)
#: The limit guards against waiting for a round of metrics for ever.
_PUBLISH_TIMEOUT_S = 600.0
_HEARTBEAT = "oasr_heartbeat_seconds"
_PROBED = "chaos_probed_seconds"


@dataclass(frozen=True)
class Streams:
    """The counts of all model instances together, as published on the metrics port."""

    active: int
    free_blocks: int
    used_blocks: int

    @classmethod
    def read(cls, server: TritonServer) -> Streams:
        """Counts up to a publishing interval old. Raises KeyError when a server publishes none."""
        names = ("oasr_active_streams", "oasr_free_blocks", "oasr_used_blocks")
        give_up_s = time.monotonic() + _PUBLISH_TIMEOUT_S
        while True:
            metrics = Metrics.fetch(server.metrics_url)
            if all(name in metrics for name in names) or time.monotonic() > give_up_s:
                return cls(*(int(metrics.total(name)) for name in names))
            time.sleep(0.1)


def num_opened(server: TritonServer) -> int:
    """Streams opened since the start, as published up to a publishing interval ago."""
    return int(Metrics.fetch(server.metrics_url).total("oasr_streams_opened_total"))


@dataclass(frozen=True)
class Memory:
    """One reading. `server_kib` is resident in tritonserver, `stub_kib` in the model's process.

    `shm_kib` is the size of the regions in /dev/shm and `shm_used_kib` what is in use in them.
    `heap_kib` and `python_blocks` are what the model's process has allocated and not freed, in C
    and in Python. The last three are up to a second old.
    """

    at_s: float
    server_kib: int
    stub_kib: int
    shm_kib: int
    shm_used_kib: int
    heap_kib: int
    python_blocks: int

    @classmethod
    def read(cls, server: TritonServer) -> Memory:
        metrics, size_kib = Metrics.fetch(server.metrics_url), shm_kib(server)
        return cls(
            at_s=time.monotonic(),
            server_kib=_rss_kib(server.pid),
            stub_kib=sum(map(_rss_kib, stub_processes(server))),
            shm_kib=size_kib,
            shm_used_kib=size_kib - int(metrics.total("chaos_shm_free_bytes")) // 1024,
            heap_kib=int(metrics.total("chaos_heap_bytes")) // 1024,
            python_blocks=int(metrics.total("chaos_python_blocks")),
        )

    @classmethod
    def at_rest(cls, server: TritonServer) -> Memory:
        """Reads once the published figures are of now; no request may be in work."""
        _wait_for_later(server, _PROBED, time.time())
        return cls.read(server)


def wait_until_published(server: TritonServer, model_name: str = MODEL_NAME) -> None:
    """Waits until the backend's metrics are those of a moment after the call.

    A round of publishing begins with the heartbeat, which is in whole seconds. So the first one
    above the present second is of later, and its round is over when the next one comes. Raises
    TimeoutError when none comes.
    """
    later_s = _wait_for_later(server, _HEARTBEAT, time.time(), model=model_name)
    _wait_for_later(server, _HEARTBEAT, later_s, model=model_name)


def _wait_for_later(server: TritonServer, name: str, than_s: float, **labels: str) -> float:
    """The first value of a clock on the metrics port that is above `than_s`."""
    give_up_s = time.monotonic() + _PUBLISH_TIMEOUT_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(KeyError):
            value_s = Metrics.fetch(server.metrics_url).total(name, **labels)
            if value_s > than_s:
                return value_s
        time.sleep(0.1)
    raise TimeoutError(f"{name} stayed below {than_s:.1f} for {_PUBLISH_TIMEOUT_S:g} s")


def shm_kib(server: TritonServer) -> int:
    """Size of the server's regions in /dev/shm; they grow on demand and never shrink."""
    total = 0
    for region in leftover_regions(server.settings.shm_prefix):
        with contextlib.suppress(FileNotFoundError):
            total += region.stat().st_size
    return total // 1024


def _rss_kib(process: int) -> int:
    with contextlib.suppress(OSError):
        match = _RSS.search(Path("/proc", str(process), "status").read_text(encoding="utf-8"))
        return int(match[1]) if match else 0
    return 0


def slope_per_minute(at_s: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between all pairs: a few outliers do not tilt it."""
    step = max(1, len(values) // _MAX_SLOPE_SAMPLES)
    points = list(zip(at_s[::step], values[::step], strict=True))
    slopes = [
        (later - earlier) / (later_s - earlier_s)
        for index, (earlier_s, earlier) in enumerate(points)
        for later_s, later in points[index + 1 :]
    ]
    return 60.0 * statistics.median(slopes) if slopes else 0.0


def stub_processes(server: TritonServer) -> list[int]:
    """The processes in which the model runs."""
    found = []
    for process in running_in_group(server.pid):
        with contextlib.suppress(OSError):
            command = Path("/proc", str(process), "cmdline").read_bytes()
            if b"triton_python_backend_stub" in command.split(b"\0")[0]:
                found.append(process)
    return found


async def stall_now_and_then(
    server: TritonServer, chance: random.Random, deeds: Counter[str]
) -> None:
    """Makes steps slow: the stub stands still for a moment, again and again until cancelled."""
    while True:
        await asyncio.sleep(chance.uniform(*_STALL_EVERY_S))
        stubs = stub_processes(server)
        deeds["slow step"] += bool(stubs)
        try:
            for stub in stubs:
                os.kill(stub, signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(*_STALL_S))
        finally:
            for stub in stubs:
                os.kill(stub, signal.SIGCONT)


async def watch(server: TritonServer, *, into: list[Memory], interval_s: float) -> None:
    """Takes readings until cancelled."""
    while True:
        into.append(await asyncio.to_thread(Memory.read, server))
        await asyncio.sleep(interval_s)


def wait_until_empty(server: TritonServer, free_blocks: int, timeout_s: float) -> Streams:
    """Reads only the metrics until no stream is left; returns the last reading."""
    wait_until_published(server)
    give_up_s = time.monotonic() + timeout_s
    while True:
        streams = Streams.read(server)
        is_empty = streams.active == 0 and streams.free_blocks == free_blocks
        if is_empty or time.monotonic() > give_up_s:
            return streams
        time.sleep(0.2)
