from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from oasr_backend.errors import ServerError
from oasr_backend.serve.group import running_in_group
from oasr_backend.serve.ports import bind_error
from oasr_backend.serve.process import TritonServer, local_settings
from oasr_backend.serve.shm import leftover_regions
from tests.guards import GUARD_S, wait_until

pytestmark = pytest.mark.live

ECHO_REPOSITORY = Path(__file__).parent / "data" / "echo_repository"


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[TritonServer]:
    with TritonServer(local_settings(ECHO_REPOSITORY, overrides={"key": "value"})) as server:
        server.wait_ready(GUARD_S)
        yield server


def _fresh_server(*, log_path: Path | None = None, **overrides: str) -> TritonServer:
    return TritonServer(local_settings(ECHO_REPOSITORY, overrides=overrides), log_path=log_path)


def _assert_nothing_is_left(server: TritonServer) -> None:
    assert running_in_group(server.pid) == []
    assert leftover_regions(server.settings.shm_prefix) == []
    assert all(bind_error("127.0.0.1", port) is None for port in server.settings.ports.values())


def _send(client: Any, module: Any, values: list[float], **sequence: Any) -> Any:
    tensor = module.InferInput("VALUES", [1, len(values)], "FP32")
    tensor.set_data_from_numpy(np.array([values], dtype=np.float32))
    return client.infer("echo_sequence", [tensor], **sequence)


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_a_sequence_keeps_its_state_over_http_and_grpc(server: TritonServer, module: Any) -> None:
    url = server.http_url if module is tritonclient.http else server.grpc_url
    with module.InferenceServerClient(url) as client:
        _send(client, module, [1.0, 2.0], sequence_id=7, sequence_start=True)
        result = _send(client, module, [4.0], sequence_id=7, sequence_end=True)
    assert result.as_numpy("SUM").item() == 7.0


def test_the_model_sees_the_overrides_and_the_packages_of_this_environment(
    server: TritonServer,
) -> None:
    module = tritonclient.grpc
    with module.InferenceServerClient(server.grpc_url) as client:
        ends = {"sequence_start": True, "sequence_end": True}
        result = _send(client, module, [0.0], sequence_id=8, **ends)
    settings = json.loads(result.as_numpy("SETTINGS").item())
    assert settings["overrides"] == {"key": "value"}
    assert settings["prefix"] == sys.prefix


def test_a_server_that_runs_is_not_started_again(server: TritonServer) -> None:
    with pytest.raises(ServerError, match="started before"):
        server.start()


def test_two_servers_run_side_by_side(server: TritonServer) -> None:
    with _fresh_server() as other:
        other.wait_ready(GUARD_S)
        assert server.is_ready()
    _assert_nothing_is_left(other)
    assert server.is_ready()


def test_a_stop_ends_the_stubs_and_frees_ports_and_shared_memory() -> None:
    server = _fresh_server()
    server.start()
    server.wait_ready(GUARD_S)
    # The group holds the server and at least one stub.
    assert len(running_in_group(server.pid)) >= 2
    assert leftover_regions(server.settings.shm_prefix) != []
    server.stop()
    assert server.exit_status == 0
    _assert_nothing_is_left(server)
    server.stop()


def test_a_clean_stop_removes_the_temporary_log() -> None:
    with _fresh_server() as server:
        server.wait_ready(GUARD_S)
        assert server.log_path is not None
        assert "echo_sequence" in server.log_tail(200)
    assert not server.log_path.exists()


def test_a_server_killed_by_sigkill_leaves_nothing_after_the_stop(tmp_path: Path) -> None:
    server = _fresh_server(log_path=tmp_path / "log")
    server.start()
    server.wait_ready(GUARD_S)
    os.killpg(server.pid, signal.SIGKILL)
    server.stop()
    assert server.exit_status == -signal.SIGKILL
    _assert_nothing_is_left(server)


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = _fresh_server(log_path=tmp_path / "log")
    server.start()
    server.wait_ready(GUARD_S)
    server.send_signal(signal.SIGSTOP)
    with caplog.at_level(logging.WARNING, logger="oasr_backend"):
        server.stop(grace_s=0.5)
    assert "ignored SIGTERM for 0.5 s" in caplog.text
    assert server.exit_status == -signal.SIGKILL
    _assert_nothing_is_left(server)


def test_a_model_that_cannot_load_ends_the_wait_with_the_log() -> None:
    server = _fresh_server(load_delay_s="not a number")
    with pytest.raises(ServerError, match="could not convert string to float"), server:
        server.wait_ready(GUARD_S)
    assert server.log_path is not None
    server.log_path.unlink()
    _assert_nothing_is_left(server)


def test_a_wait_that_takes_too_long_names_the_time(tmp_path: Path) -> None:
    server = _fresh_server(log_path=tmp_path / "log", load_delay_s=str(GUARD_S))
    server.start()
    with pytest.raises(ServerError, match=r"not ready after 0\.5 s"):
        server.wait_ready(0.5)
    # A server whose model loads does not end at SIGTERM.
    server.stop(grace_s=0.0)
    _assert_nothing_is_left(server)


def test_a_server_that_was_not_started_says_so() -> None:
    server = _fresh_server()
    server.stop()
    with pytest.raises(ServerError, match="call start"):
        server.send_signal(signal.SIGTERM)


OWNER = f"""
import os, signal, subprocess, threading
from pathlib import Path
from oasr_backend.serve.process import TritonServer, local_settings
server = TritonServer(local_settings(Path({str(ECHO_REPOSITORY)!r})), log_path=Path(os.devnull))
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
server.wait_ready({GUARD_S})
print(server.pid, server.settings.shm_prefix, flush=True)
"""


def _run_owner(end: str) -> tuple[int, str]:
    """A process that starts a server from a short-lived thread, then ends as told.

    Returns the server's process group and the prefix of its regions.
    """
    owner = subprocess.run([sys.executable, "-c", OWNER + end], capture_output=True, text=True)
    group, prefix = owner.stdout.split()
    assert prefix.startswith("oasr_"), owner.stderr
    return int(group), prefix


def _is_gone(group: int, prefix: str) -> bool:
    return running_in_group(group) == [] and leftover_regions(prefix) == []


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"], ids=["killed", "forgetful"]
)
def test_a_server_does_not_outlive_its_owner(end: str) -> None:
    group, prefix = _run_owner(end)
    wait_until(lambda: _is_gone(group, prefix), what="the server is gone")


def test_a_server_outlives_the_thread_that_started_it() -> None:
    server = _fresh_server()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        server.wait_ready(GUARD_S)
        assert server.exit_status is None
    _assert_nothing_is_left(server)


def test_regions_that_nobody_could_remove_go_at_the_next_start() -> None:
    """Owner, server and guard are killed at once, as after a loss of power."""
    group, prefix = _run_owner("""
def is_guard(process):
    try:
        return f"oasr-guard\\0{server.pid}\\0".encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False
(guard,) = filter(is_guard, Path("/proc").glob("[0-9]*"))
os.kill(int(guard.name), signal.SIGKILL)
os.killpg(server.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert leftover_regions(prefix) != []
    with _fresh_server() as server:
        server.wait_ready(GUARD_S)
        assert leftover_regions(prefix) == []
    assert running_in_group(group) == []


def test_a_server_that_still_loads_is_killed_without_a_grace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = _fresh_server(load_delay_s=str(GUARD_S))
    server.start()
    with pytest.raises(ServerError, match="not ready after"):
        server.wait_ready(1.0)
    with caplog.at_level(logging.WARNING, logger="oasr_backend"):
        server.stop()
    assert server.exit_status == -signal.SIGKILL
    assert caplog.text == "", "nobody has waited for it"
    _assert_nothing_is_left(server)
    assert server.log_path is not None
    server.log_path.unlink()
