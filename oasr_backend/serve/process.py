"""One tritonserver as a child process: start, wait, stop, nothing left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO

from oasr_backend.errors import ServerError
from oasr_backend.serve.command import (
    EXIT_TIMEOUT_S,
    ServerSettings,
    build_command,
    build_environment,
)
from oasr_backend.serve.embedded import TritonInstall, find_triton
from oasr_backend.serve.ports import find_free_ports, reachable_host
from oasr_backend.serve.repository import model_names
from oasr_backend.serve.shm import remove_orphaned_regions, remove_regions

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_KILL_POLL_S = 0.01
_KILL_WAIT_S = 2.0
_LOG_TAIL_LINES = 30
_CAUSE_SEARCH_LINES = 1_000
_LOG_LEVEL = re.compile(r"[IWEF]\d{4} |error:|Error:")
# Requests to the server on this machine never go through a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class TritonServer:
    """A tritonserver in its own process group.

    `log_path` None puts the log in a temporary file, which stays after a failed start and goes
    with a clean stop; `inherit_output` sends it to the caller's own output instead.

        with TritonServer(local_settings(repository)) as server:
            server.wait_ready(60)

    A server with open sequences drains until its exit time-out: Triton waits for their END. It
    also waits for HTTP clients that keep a connection open.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        install: TritonInstall | None = None,
        log_path: Path | None = None,
        inherit_output: bool = False,
    ) -> None:
        self.settings = settings
        self.log_path = log_path
        self._install = install
        self._inherit_output = inherit_output
        self._owns_log = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def http_url(self) -> str:
        """`host:port` without a scheme, as tritonclient wants it."""
        return f"{reachable_host(self.settings.host)}:{self.settings.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{reachable_host(self.settings.host)}:{self.settings.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """A full URL, scheme and path included."""
        return f"http://{reachable_host(self.settings.host)}:{self.settings.metrics_port}/metrics"

    @property
    def is_started(self) -> bool:
        """Whether there is a process, running or ended."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id, also the id of the process group. Raises ServerError before the start."""
        return self._started().pid

    @property
    def exit_status(self) -> int | None:
        """As `Popen.returncode`: None while the server runs, -N when signal N ended it."""
        return self._started().poll()

    def start(self) -> None:
        """Start the process and return at once. Raises ServerError when it cannot be started."""
        if self._process is not None:
            raise ServerError(f"this TritonServer was started before (process {self.pid})")
        install = self._install or find_triton()
        remove_orphaned_regions()
        command = build_command(install, self.settings)
        environment = build_environment(install, self.settings)
        with self._open_log() as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
            )
        logger.info("started %s as process %d", install.binary, self.pid)

    def wait_ready(self, timeout_s: float) -> None:
        """Block until the server and all its models are ready.

        Raises ServerError with the end of the log when the process ends or the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready():
            if self.exit_status is not None:
                raise ServerError(self._failure(f"ended with status {self.exit_status}"))
            if time.monotonic() > deadline_s:
                raise ServerError(self._failure(f"was not ready after {timeout_s:g} s"))
            time.sleep(_POLL_S)

    def is_ready(self) -> bool:
        """Whether the server answers and every model of the repository is loaded."""
        names = model_names(self.settings.model_repository)
        # With explicit control only the models named by --load-model are loaded.
        if any(flag.startswith("--model-control-mode") for flag in self.settings.extra_flags):
            names = []
        paths = [f"models/{name}/ready" for name in names]
        return all(self._answers_ok(path) for path in ["health/ready", *paths])

    def send_signal(self, number: int) -> None:
        """Pass a signal on to the server process; nothing happens when it has ended."""
        self._started().send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int:
        """Block until the server ends by itself, clear up, and return `exit_status`.

        Raises subprocess.TimeoutExpired.
        """
        status = self._started().wait(timeout_s)
        self._clear_up()
        return status

    def stop(self, grace_s: float = EXIT_TIMEOUT_S + 5.0) -> None:
        """End the server: SIGTERM, and SIGKILL to its whole group after `grace_s`. Idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                logger.warning("tritonserver %d ignored SIGTERM for %s s", self.pid, grace_s)
        self._clear_up()
        if self.exit_status == 0:
            self._remove_own_log()

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of the log; empty when the output is inherited."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if error is None:
            self._remove_own_log()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the tritonserver was not started; call start() first")
        return self._process

    def _open_log(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        if self._inherit_output:
            return contextlib.nullcontext()
        if self.log_path is None:
            handle, name = tempfile.mkstemp(prefix="oasr-tritonserver-", suffix=".log")
            self.log_path, self._owns_log = Path(name), True
            return os.fdopen(handle, "wb")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        return self.log_path.open("wb")

    def _answers_ok(self, path: str) -> bool:
        try:
            with _OPENER.open(f"http://{self.http_url}/v2/{path}", timeout=2.0) as response:
                return bool(response.status == 200)
        except (OSError, ValueError):
            return False

    def _failure(self, what: str) -> str:
        if self.log_path is None:
            return f"tritonserver {what}; see its output"
        cause = error_lines(self.log_tail(_CAUSE_SEARCH_LINES)) or self.log_tail()
        return f"tritonserver {what}; its log is {self.log_path}:\n{cause}"

    def _remove_own_log(self) -> None:
        if self._owns_log and self.log_path is not None:
            self.log_path.unlink(missing_ok=True)

    def _clear_up(self) -> None:
        process = self._started()
        # The stubs share the group; one that outlives its server holds memory and the GPU.
        _kill_group(process)
        remove_regions(self.settings.shm_prefix)


def error_lines(log: str) -> str:
    """The errors of a Triton log with the lines that belong to them, such as tracebacks."""
    kept, in_error = [], False
    for line in log.splitlines():
        if _LOG_LEVEL.match(line):
            in_error = line.startswith(("E", "error:"))
        elif line.startswith(("+--", "| ")):
            in_error = False
        if in_error and line.strip():
            kept.append(line)
    return "\n".join(kept[-_LOG_TAIL_LINES:])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the group of a process, then a bounded wait until nobody in it runs."""
    deadline_s = time.monotonic() + _KILL_WAIT_S
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            if not running_in_group(process.pid) or time.monotonic() > deadline_s:
                break
            time.sleep(_KILL_POLL_S)
    process.wait()


def running_in_group(group_id: int) -> list[int]:
    """Ids of the processes of a group, without zombies: those only wait for a parent to look."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command name before the last parenthesis may itself hold spaces.
            state, _, group, *_ = entry.read_text().rpartition(")")[2].split()
            if int(group) == group_id and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


def local_settings(
    model_repository: Path,
    *,
    overrides: dict[str, str] | None = None,
    extra_flags: tuple[str, ...] = (),
) -> ServerSettings:
    """Settings for a private server on this machine: three free ports on 127.0.0.1."""
    http_port, grpc_port, metrics_port = find_free_ports(3)
    return ServerSettings(
        model_repository=model_repository,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        overrides=overrides or {},
        extra_flags=extra_flags,
    )
