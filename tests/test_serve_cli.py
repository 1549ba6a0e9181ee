from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oasr_backend.serve.app import app
from oasr_backend.serve.ports import bind_error, find_free_ports
from oasr_backend.serve.process import running_in_group
from oasr_backend.serve.shm import SHM_DIRECTORY

ECHO_REPOSITORY = Path(__file__).parent / "data" / "echo_repository"
OASR_SERVE = Path(sys.executable).parent / "oasr-serve"
FLAGS = ("--http-port", "--grpc-port", "--metrics-port")


def _arguments(*more: str) -> tuple[list[str], list[int]]:
    ports = find_free_ports(3)
    arguments = ["--model-repository", str(ECHO_REPOSITORY), "--host", "127.0.0.1"]
    for flag, port in zip(FLAGS, ports, strict=True):
        arguments += [flag, str(port)]
    return [*arguments, *more], ports


def _wait_until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _regions_of(process_id: int) -> list[str]:
    return [path.name for path in SHM_DIRECTORY.iterdir() if f"_{process_id}_" in path.name]


def test_a_machine_in_order_passes_check_only() -> None:
    arguments, _ = _arguments("--check-only")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "all checks passed" in result.stdout


def test_every_problem_is_shown_at_once_with_status_2(tmp_path: Path) -> None:
    arguments, ports = _arguments("--checkpoint", str(tmp_path / "none"), "--check-only")
    with socket.create_server(("127.0.0.1", ports[1])):
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["port", "checkpoint"]
    assert "choose another port with --grpc-port" in lines[0]


def test_a_skipped_check_does_not_stop_the_start(tmp_path: Path) -> None:
    arguments, _ = _arguments("--checkpoint", str(tmp_path / "none"), "--check-only")
    result = CliRunner().invoke(app, [*arguments, "--skip-check", "checkpoint"])
    assert result.exit_code == 0


def test_a_wrong_setting_is_one_line_with_status_2() -> None:
    arguments, _ = _arguments("--set", "[max_streams]")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --set '[max_streams]' is not KEY=VALUE")
    assert len(result.stderr.splitlines()) == 1


def test_the_printed_command_ends_with_the_flags_for_triton() -> None:
    arguments, ports = _arguments("--print-command", "--set", "a=b", "--", "--log-verbose=1")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert result.stdout.rstrip().endswith("--log-verbose=1")
    assert f"--grpc-port={ports[1]}" in result.stdout
    assert "OASR_BACKEND_OVERRIDES=" in result.stdout


@pytest.mark.triton
def test_oasr_serve_becomes_the_server_and_ends_at_sigterm(tmp_path: Path) -> None:
    arguments, ports = _arguments()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [OASR_SERVE, *arguments], stdout=log, stderr=log, start_new_session=True
        )
    try:
        assert _wait_until(lambda: _answers(ports[0]), timeout_s=60)
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert command.partition(b"\0")[0].endswith(b"tritonserver")
        assert _regions_of(process.pid) != []
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert _wait_until(lambda: running_in_group(process.pid) == [], timeout_s=5)
        assert _regions_of(process.pid) == []
    finally:
        _kill(process)


@pytest.mark.triton
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_watched_server_says_ready_and_gets_the_signal(number: signal.Signals) -> None:
    arguments, ports = _arguments("--wait-ready", "60")
    process = subprocess.Popen(
        [OASR_SERVE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        ready_line = process.stdout.readline()
        assert ready_line == f"ready: http 127.0.0.1:{ports[0]}, grpc 127.0.0.1:{ports[1]}\n"
        assert _answers(ports[0])
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode == 0
        assert all(bind_error("127.0.0.1", port) is None for port in ports)
        assert _regions_of(process.pid) == []
    finally:
        _kill(process)


@pytest.mark.triton
def test_a_server_that_is_not_ready_in_time_is_stopped_with_status_1() -> None:
    arguments, ports = _arguments("--wait-ready", "1", "--set", "load_delay_s=5")
    result = subprocess.run(
        [OASR_SERVE, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert "error: tritonserver was not ready after 1 s" in result.stderr
    assert all(bind_error("127.0.0.1", port) is None for port in ports)


def _kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for member in running_in_group(process.pid):
        os.kill(member, signal.SIGKILL)
