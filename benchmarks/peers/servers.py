"""Each recogniser's own server as a child process, with the flags that suit it best.

Ours is `oasr-serve` with its defaults: real tritonserver, gRPC. The peer's is the websocket server
that its wheel brings, fp32 or int8. Tried for the latter on two cores with 8 and 32 streams: one to
three decoding threads, one or two threads a window, 1, 4 or 5 streams a task, and a look for ready
streams each 2, 5 or 10 ms. Two threads a window cost 2 to 4 times the processor time. A look each
10 ms, its default, adds 4 ms to the median latency. The rest differed less than two runs of one.
It decodes one stream at a time in any case, so one stream a task answers soonest.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.peers.export import ExportedModel
from benchmarks.peers.packages import server_binary
from benchmarks.workload import DEMO_DIRECTORY, MODEL_REPOSITORY
from oasr_backend.errors import ServerError
from oasr_backend.serve.ports import find_free_ports

_HOST = "127.0.0.1"
_READY_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Server:
    """How one server is started. `url` is what its clients call; `ready_url` empty: it listens."""

    name: str
    command: tuple[str, ...]
    url: str
    port: int
    ready_url: str = ""

    @property
    def is_ours(self) -> bool:
        return bool(self.ready_url)


class RunningServer:
    """A started server; it ends with the block."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            server.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> float:
        """Seconds from the start. Raises ServerError with the end of its log."""
        while not _is_ready(self.server):
            if self._process.poll() is not None:
                raise ServerError(f"{self.server.name} ended: {self._log_tail()}")
            if time.monotonic() - self._started_s > _READY_TIMEOUT_S:
                raise ServerError(
                    f"{self.server.name} is not ready after {_READY_TIMEOUT_S:g} s: "
                    f"{self._log_tail()}"
                )
            time.sleep(_POLL_S)
        return time.monotonic() - self._started_s

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].decode("utf-8", errors="replace")


def our_server(exported: ExportedModel, *, extra_flags: tuple[str, ...] = ()) -> Server:
    """`oasr-serve` with the demo model."""
    http_port, grpc_port, metrics_port = find_free_ports(3)
    command = (
        str(Path(sys.executable).with_name("oasr-serve")),
        f"--model-repository={MODEL_REPOSITORY}",
        f"--checkpoint={DEMO_DIRECTORY}",
        "--device=cpu",
        f"--set=chunk_size={exported.chunk_size}",
        f"--set=num_left_chunks={exported.num_left_chunks}",
        f"--host={_HOST}",
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        f"--metrics-port={metrics_port}",
        *extra_flags,
    )
    ready_url = f"http://{_HOST}:{http_port}/v2/health/ready"
    return Server("ours", command, f"{_HOST}:{grpc_port}", grpc_port, ready_url)


def peer_server(name: str, exported: ExportedModel, model: Path, *flags: str) -> Server:
    """sherpa-onnx's server. It listens on all addresses, which no flag of it changes."""
    (port,) = find_free_ports(1)
    command = (
        str(server_binary()),
        f"--port={port}",
        f"--wenet-ctc-model={model}",
        f"--wenet-ctc-chunk-size={exported.chunk_size}",
        f"--wenet-ctc-num-left-chunks={exported.num_left_chunks}",
        f"--tokens={exported.tokens}",
        "--model-type=wenet_ctc",
        "--enable-endpoint=false",
        "--high-freq=0",
        f"--log-file={os.devnull}",
        *(flags or peer_flags()),
    )
    return Server(name, command, f"ws://{_HOST}:{port}", port)


def peer_flags() -> tuple[str, ...]:
    cores = len(os.sched_getaffinity(0))
    return (
        f"--num-work-threads={cores}",
        "--num-io-threads=1",
        "--num-threads=1",
        "--max-batch-size=1",
        "--loop-interval-ms=2",
    )


def _is_ready(server: Server) -> bool:
    if server.ready_url:
        try:
            with _OPENER.open(server.ready_url, timeout=2.0) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False
    try:
        with socket.create_connection((_HOST, server.port), timeout=2.0):
            return True
    except OSError:
        return False
