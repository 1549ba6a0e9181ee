"""One tritonserver as a child process: start, wait, stop, nothing left behind."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from oasr_backend.errors import ServerError
from oasr_backend.serve.command import (
    EXIT_TIMEOUT_S,
    ServerSettings,
    build_command,
    build_environment,
)
from oasr_backend.serve.derived import with_own_paths
from oasr_backend.serve.drain import Drain
from oasr_backend.serve.embedded import TritonInstall, find_triton
from oasr_backend.serve.group import kill_group, wait_asleep
from oasr_backend.serve.guard import OwnerGuard
from oasr_backend.serve.output import TAIL_LINES, ServerOutput
from oasr_backend.serve.ports import find_free_ports, reachable_host
from oasr_backend.serve.repository import model_names
from oasr_backend.serve.shm import remove_orphaned_regions, remove_regions

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# A start is told the sooner; a look at a server that loads is a refused connection.
_READY_POLL_S = 0.05
# Requests to the server on this machine never go through a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class TritonServer:
    """A tritonserver in its own process group.

    `log_path` None puts the log in a temporary file, which stays after a failed start and goes
    with a clean stop; `inherit_output` passes it on to the caller's stderr instead.

        with TritonServer(local_settings(repository)) as server:
            server.wait_ready(60)

    The server does not outlive its owner: when the process that started it is killed, so is it.
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
        self._output = ServerOutput(log_path, is_relayed=inherit_output)
        self._install = install
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: OwnerGuard | None = None
        self._was_ready = False
        self._has_drained = False

    @property
    def log_path(self) -> Path | None:
        """The file of the log; None before the start, and where the output is inherited."""
        return self._output.path

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
        """Whether a process exists, running or ended."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id, also the id of the process group. Raises ServerError before the start."""
        return self._started().pid

    @property
    def exit_status(self) -> int | None:
        """The server's `Popen.returncode`: None while it runs, -N when signal N ended it."""
        return self._started().poll()

    def start(self) -> None:
        """Start the process and return at once. Raises ServerError when it cannot be started."""
        if self._process is not None:
            raise ServerError(f"this TritonServer was started before (process {self.pid})")
        install = self._install or find_triton()
        remove_orphaned_regions()
        command = build_command(install, self.settings)
        environment = build_environment(install, self.settings)
        with self._output.open(subprocess.PIPE) as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = OwnerGuard(self.pid, self.settings.shm_prefix)
        self._output.attach(self._process.stdout)
        logger.info("started %s as process %d", install.binary, self.pid)

    def wait_ready(self, timeout_s: float) -> None:
        """Block until the server and all its models are ready.

        Raises ServerError with the cause, as the log tells it, when the process ends or the time
        is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.is_ready():
            if self.exit_status is not None:
                raise ServerError(self._failure(f"ended with status {self.exit_status}"))
            if time.monotonic() > deadline_s:
                raise ServerError(self._failure(f"was not ready after {timeout_s:g} s"))
            time.sleep(_READY_POLL_S)

    def is_ready(self) -> bool:
        """Whether every port of the server answers and every model of the repository is loaded."""
        names = model_names(self.settings.model_repository)
        # With explicit control only the models named by --load-model are loaded.
        if any(flag.startswith("--model-control-mode") for flag in self.settings.extra_flags):
            names = []
        paths = ["health/ready", *(f"models/{name}/ready" for name in names)]
        urls = [f"http://{self.http_url}/v2/{path}" for path in paths]
        # Triton opens this port last.
        if not any(flag.startswith("--allow-metrics") for flag in self.settings.extra_flags):
            urls.append(self.metrics_url)
        is_ready = all(_read(url) is not None for url in urls)
        self._was_ready = self._was_ready or is_ready
        return is_ready

    def metrics_page(self) -> str | None:
        """The present page of the metrics port; None where it does not answer."""
        return _read(self.metrics_url, timeout_s=1.0)

    def send_signal(self, number: int) -> None:
        """Pass a signal on to the server process; nothing happens when it has ended."""
        self._started().send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int:
        """Block until the server ends by itself, clear up, and return `exit_status`.

        Raises subprocess.TimeoutExpired.
        """
        status = wait_asleep(self._started(), timeout_s)
        self._clear_up()
        return status

    def stop(self, grace_s: float = EXIT_TIMEOUT_S + 5.0) -> None:
        """End the server: SIGTERM, and SIGKILL to its whole group after `grace_s`. Idempotent.

        Requests in hand are answered, and open streams served on, until Triton's exit time-out.
        When no stream has sent anything for a while the wait ends early. A server that still
        loads has nothing to answer and is killed at once.
        """
        if self._process is None:
            return
        if self._process.poll() is None and self._may_hold_requests():
            self._process.send_signal(signal.SIGTERM)
            self._drain(self._process, grace_s)
        self._clear_up()
        if self.exit_status == 0 or self._has_drained:
            self._output.remove_own()

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log."""
        return self._output.tail(lines)

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
            self._output.remove_own()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the tritonserver was not started; call start() first")
        return self._process

    def _may_hold_requests(self) -> bool:
        return self._was_ready or _read(f"http://{self.http_url}/v2/health/live") is not None

    def _drain(self, process: subprocess.Popen[bytes], grace_s: float) -> None:
        begin_s = time.monotonic()
        drain = Drain(begin_s)
        while process.poll() is None:
            now_s = time.monotonic()
            if now_s - begin_s > grace_s:
                logger.warning("tritonserver %d ignored SIGTERM for %s s", self.pid, grace_s)
                return
            if drain.is_over(self.metrics_page() or "", now_s):
                self._has_drained = True
                return
            time.sleep(_POLL_S)

    def _failure(self, what: str) -> str:
        if self.exit_status is not None:
            self._output.join()
        where = "" if self.log_path is None else f"; its log is {self.log_path}"
        return f"tritonserver {what}{where}:\n{_own(self._output.cause(), self.settings)}"

    def _clear_up(self) -> None:
        process = self._started()
        # The stubs share the group; one that outlives its server holds memory and the GPU.
        kill_group(process)
        remove_regions(self.settings.shm_prefix)
        if self._guard is not None:
            self._guard.release()
        self._output.join()


def _own(text: str, settings: ServerSettings) -> str:
    return with_own_paths(text, settings.model_repository, settings.instances)


def _read(url: str, *, timeout_s: float = 2.0) -> str | None:
    """The page; None where no answer comes, or one with a status other than 200."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as response:
            return str(response.read().decode()) if response.status == 200 else None
    except (OSError, ValueError):
        return None


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
