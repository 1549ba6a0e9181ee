from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import InferenceServerClient
from typer.testing import CliRunner

from oasr_backend.serve.app import app
from oasr_backend.serve.drain import QUIET_S
from oasr_backend.serve.group import running_in_group
from oasr_backend.serve.ports import bind_error, find_free_ports
from oasr_backend.serve.shm import SHM_DIRECTORY
from oasr_backend.serve.stack import STACK_BYTES
from tests.conftest import GOLDEN_DIR, MODEL_REPOSITORY
from tests.guards import GUARD_S, wait_until
from tests.triton.wire import audio, sequence, text_of

ECHO_REPOSITORY = Path(__file__).parent / "data" / "echo_repository"
GOLDEN = GOLDEN_DIR / "wenet_small"
OASR_SERVE = Path(sys.executable).parent / "oasr-serve"
FLAGS = ("--http-port", "--grpc-port", "--metrics-port")


def _arguments(*more: str, repository: Path = ECHO_REPOSITORY) -> tuple[list[str], list[int]]:
    ports = find_free_ports(3)
    arguments = ["--model-repository", str(repository), "--host", "127.0.0.1"]
    for flag, port in zip(FLAGS, ports, strict=True):
        arguments += [flag, str(port)]
    return [*arguments, *more], ports


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/v2/health/ready", timeout=GUARD_S
        ) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _are_free(ports: list[int]) -> bool:
    return all(bind_error("127.0.0.1", port) is None for port in ports)


def _regions_of(process_id: int) -> list[str]:
    return [path.name for path in SHM_DIRECTORY.iterdir() if f"_{process_id}_" in path.name]


def test_the_help_says_who_stays_beside_the_server_and_who_becomes_it() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert (
        "oasr-serve starts tritonserver and stays beside it; with --exec it becomes tritonserver."
        in " ".join(result.stdout.split())
    )


def test_a_machine_in_order_passes_check_only() -> None:
    arguments, _ = _arguments("--check-only")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "all checks passed" in result.stdout


def test_check_only_says_which_model_it_loaded_with_which_checkpoint() -> None:
    arguments, _ = _arguments("--check-only", repository=MODEL_REPOSITORY)
    for more, folder in (
        ([], MODEL_REPOSITORY / "oasr_streaming" / "demo_en"),
        (["--checkpoint", f"oasr_streaming:{GOLDEN}"], GOLDEN),
    ):
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.stderr
        (line,) = result.stdout.splitlines()
        assert line.startswith(
            f"all checks passed; loaded oasr_streaming with {folder}; the server"
        )


def _cut(folder: Path) -> None:
    """Cuts the weights as an interrupted copy does."""
    weights = folder / "final.pt"
    weights.write_bytes(weights.read_bytes()[:100_000])


def _lose_cmvn(folder: Path) -> None:
    (folder / "global_cmvn").unlink()


@pytest.mark.parametrize(
    ("more", "damage", "words"),
    [
        ([], _cut, ["final.pt (100000 bytes) is truncated", "copy it again"]),
        ([], _lose_cmvn, ["global_cmvn does not exist", "Copy it there"]),
        (
            ["--set", "chunk_size=wide"],
            None,
            ["chunk_size='wide' is not an integer; write one such as 16"],
        ),
        (
            ["--set", "stream_idle_timeout_s=60"],
            None,
            ["must exceed Triton's max_sequence_idle_microseconds (60 s)"],
        ),
        (["--device", "cuda:99"], None, ["device='cuda:99'", "GPU", "; set device"]),
        (["--set", "cpu_kv_budget_mib=1"], None, ["max_streams=256", "set cpu_kv_budget_mib="]),
    ],
)
def test_check_only_says_in_one_line_why_the_model_would_not_load(
    tmp_path: Path, more: list[str], damage: Callable[[Path], None] | None, words: list[str]
) -> None:
    checkpoint = Path(shutil.copytree(GOLDEN, tmp_path / "checkpoint"))
    if damage is not None:
        damage(checkpoint)
    arguments, _ = _arguments("--checkpoint", str(checkpoint), repository=MODEL_REPOSITORY)
    result = CliRunner().invoke(app, [*arguments, "--check-only", *more])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("load: the model oasr_streaming cannot be loaded: ")
    for word in words:
        assert word in line


def test_check_only_tells_a_limit_before_it_reads_the_weights(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(GOLDEN, tmp_path / "checkpoint"))
    (checkpoint / "final.pt").write_bytes(b"no weights" * 1000)
    repository = Path(shutil.copytree(MODEL_REPOSITORY, tmp_path / "repository"))
    config = repository / "oasr_streaming" / "config.pbtxt"
    text, count = re.subn(r"(max_candidate_sequences: )\d+", r"\g<1>9", config.read_text())
    assert count == 1
    config.write_text(text)
    arguments, _ = _arguments("--checkpoint", str(checkpoint), repository=repository)
    result = CliRunner().invoke(app, [*arguments, "--check-only"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "max_candidate_sequences=9 in config.pbtxt must exceed max_streams=" in line


def test_one_checkpoint_for_several_models_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(MODEL_REPOSITORY / "oasr_streaming", tmp_path / name)
    arguments, _ = _arguments("--print-command", repository=tmp_path)
    both = CliRunner().invoke(app, [*arguments, "--checkpoint", str(GOLDEN)])
    assert both.exit_code == 0
    assert "this checkpoint counts for 2 models (a, b); --checkpoint MODEL:DIR" in both.stderr
    each = [f"--checkpoint=a:{GOLDEN}", f"--checkpoint=b:{GOLDEN}"]
    assert CliRunner().invoke(app, [*arguments, *each]).stderr == ""


def test_every_problem_is_shown_at_once_with_status_2(tmp_path: Path) -> None:
    arguments, ports = _arguments(
        "--checkpoint", str(tmp_path / "none"), "--check-only", "--set", "num_left_chunk=4",
        repository=MODEL_REPOSITORY,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", ports[1])):
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["port", "setting", "checkpoint"]
    assert "choose another port with --grpc-port" in lines[0]
    assert lines[1] == (
        "setting: no model knows the parameter 'num_left_chunk'; did you mean 'num_left_chunks'?"
    )


def test_a_skipped_check_does_not_stop_the_start(tmp_path: Path) -> None:
    arguments, _ = _arguments(
        "--checkpoint", str(tmp_path / "none"), "--check-only", repository=MODEL_REPOSITORY
    )
    skips = ["--skip-check", "checkpoint", "--skip-check", "load"]
    result = CliRunner().invoke(app, [*arguments, *skips])
    assert result.exit_code == 0


def test_an_unknown_check_is_refused_with_the_known_ones() -> None:
    arguments, _ = _arguments("--check-only", "--skip-check", "shm", "--skip-check", "nothing")
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert "there is no check 'nothing'; name one of numpy, torch, " in result.stderr
    assert "setting, checkpoint, shm, load" in result.stderr


def test_a_file_as_checkpoint_is_told_with_its_folder() -> None:
    arguments, _ = _arguments(
        "--checkpoint", str(GOLDEN / "final.pt"), "--check-only", repository=MODEL_REPOSITORY
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr == (
        f"checkpoint: the checkpoint {GOLDEN / 'final.pt'} is a file, not a folder; "
        f"give its folder {GOLDEN} by --checkpoint\n"
    )


def test_a_wrong_setting_is_one_line_with_status_2() -> None:
    arguments, _ = _arguments("--set", "[max_streams]")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --set '[max_streams]' is not KEY=VALUE")
    assert len(result.stderr.splitlines()) == 1


def test_the_printed_command_ends_with_the_flags_for_triton() -> None:
    arguments, ports = _arguments(
        "--print-command", "--set", "load_delay_s=0", "--", "--log-verbose=1"
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert result.stdout.rstrip().endswith("--log-verbose=1")
    assert f"--grpc-port={ports[1]}" in result.stdout
    assert "OASR_BACKEND_OVERRIDES=" in result.stdout
    assert "shm-region-prefix-name=oasr_unowned_" in result.stdout, "the next start sweeps others"


def test_the_printed_command_has_the_instances_cores() -> None:
    core = max(os.sched_getaffinity(0))
    arguments, _ = _arguments("--print-command", "--instance-cores", str(core))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert " taskset --cpu-list " in result.stdout
    assert f"--host-policy=cpu,cpu-cores={core}-{core}" in result.stdout


@pytest.mark.parametrize("mode", ["--print-command", "--check-only", "--exec"])
def test_instance_cores_and_a_policy_of_ones_own_are_refused_together(mode: str) -> None:
    core = str(max(os.sched_getaffinity(0)))
    arguments, _ = _arguments(
        mode, "--instance-cores", core, "--", "--host-policy=cpu,cpu-cores=0-0"
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "cores: --host-policy=cpu,cpu-cores=0-0 would undo --instance-cores" in result.stderr


def test_instance_cores_without_taskset_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    core = str(max(os.sched_getaffinity(0)))
    arguments, _ = _arguments("--check-only", "--instance-cores", core)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "cores: --instance-cores needs taskset" in result.stderr
    assert "install the package util-linux" in result.stderr


def test_fewer_cores_than_instances_are_refused(tmp_path: Path) -> None:
    repository = Path(shutil.copytree(ECHO_REPOSITORY, tmp_path / "repository"))
    config = repository / "echo_sequence" / "config.pbtxt"
    config.write_text(config.read_text().replace("KIND_CPU count: 1", "KIND_CPU count: 2"))
    core = str(max(os.sched_getaffinity(0)))
    arguments, _ = _arguments("--check-only", "--instance-cores", core, repository=repository)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("cores: --instance-cores names too few cores for 2 instances: 1; name 2")


def _limited(limits: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`oasr-serve` from a shell that has set limits of its own."""
    arguments, _ = _arguments(*more)
    command = ["/bin/sh", "-c", f'{limits} && exec "$@"', "sh", str(OASR_SERVE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("ulimit -s 8192", ["a thread may have 8 MiB of stack", "--ulimit stack=1073741824"]),
        ("ulimit -v 60000000", ["may have 58593 MiB", "`ulimit -v unlimited`"]),
    ],
)
def test_a_limit_that_keeps_the_server_from_deep_stacks_is_told(
    limits: str, words: list[str]
) -> None:
    result = _limited(limits, "--check-only")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("stack: ")
    for word in words:
        assert word in line
    assert _limited(limits, "--check-only", "--skip-check", "stack").returncode == 0


@pytest.mark.parametrize(
    ("limits", "kib"),
    [
        ("ulimit -S -s 8192", 1 << 20),
        ("ulimit -S -s unlimited", 1 << 20),
        ("ulimit -S -s 4194304", 4 << 20),
        ("ulimit -s 65536", 65536),
    ],
)
def test_the_printed_command_raises_the_limit_of_the_stack(limits: str, kib: int) -> None:
    result = _limited(limits, "--print-command", "--skip-check", "stack")
    assert result.returncode == 0, result.stderr
    assert f"""/bin/sh -c 'ulimit -S -s "$0" && exec "$@"' {kib} """ in result.stdout


@pytest.mark.live
def test_with_exec_oasr_serve_becomes_the_server_and_ends_at_sigterm(tmp_path: Path) -> None:
    arguments, ports = _arguments("--exec")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [OASR_SERVE, *arguments], stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until(lambda: _answers(ports[0]), what="the server is ready")
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert command.partition(b"\0")[0].endswith(b"tritonserver")
        assert resource.prlimit(process.pid, resource.RLIMIT_STACK)[0] == STACK_BYTES
        assert _regions_of(process.pid) != []
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_S) == 0
        wait_until(lambda: running_in_group(process.pid) == [], what="all processes have ended")
        assert _regions_of(process.pid) == []
    finally:
        _kill(process)


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_oasr_serve_says_ready_and_stops_its_server_at_a_signal(number: signal.Signals) -> None:
    arguments, ports = _arguments()
    process = subprocess.Popen(
        [OASR_SERVE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        ready_line = process.stdout.readline()
        assert ready_line == f"ready: http 127.0.0.1:{ports[0]}, grpc 127.0.0.1:{ports[1]}\n"
        assert _answers(ports[0])
        process.send_signal(number)
        process.communicate(timeout=GUARD_S)
        assert process.returncode == 0
        assert _are_free(ports)
        assert _regions_of(process.pid) == []
    finally:
        _kill(process)


@pytest.mark.live
def test_a_server_that_is_not_ready_in_time_is_stopped_with_status_1() -> None:
    arguments, ports = _arguments("--wait-ready", "1", "--set", "load_delay_s=600")
    result = subprocess.run(
        [OASR_SERVE, *arguments], capture_output=True, text=True, timeout=GUARD_S, check=False
    )
    assert result.returncode == 1
    assert "error: tritonserver was not ready after 1 s" in result.stderr
    assert _are_free(ports)


@pytest.mark.live
def test_the_last_line_of_a_failed_start_is_the_cause_and_the_remedy() -> None:
    arguments, _ = _arguments("--set", "chunk_size=wide", repository=MODEL_REPOSITORY)
    result = subprocess.run(
        [OASR_SERVE, *arguments], capture_output=True, text=True, timeout=GUARD_S, check=False
    )
    assert result.returncode == 1
    error, cause = result.stderr.splitlines()[-2:]
    assert error == "error: tritonserver ended with status 1:"
    assert cause.startswith(
        "the model oasr_streaming was not loaded: ConfigError: chunk_size='wide' is not an "
        "integer; write one such as 16"
    )
    assert "At:" not in cause


@contextlib.contextmanager
def _serving(
    *more: str, stderr: int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """`oasr-serve` with a small model, ready."""
    arguments, ports = _arguments("--checkpoint", str(GOLDEN), *more, repository=MODEL_REPOSITORY)
    process = subprocess.Popen(
        [OASR_SERVE, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready: ")
        yield process, ports
    finally:
        _kill(process)
        process.communicate()


def _send(client: InferenceServerClient, flags: str) -> str:
    chunk = audio(tritonclient.grpc, np.zeros(8000, np.int16))
    return text_of(client.infer("oasr_streaming", chunk, **sequence("open", flags)))


@pytest.mark.live
def test_a_stream_that_nobody_ends_does_not_keep_oasr_serve_from_stopping() -> None:
    with _serving() as (process, ports):
        with InferenceServerClient(f"127.0.0.1:{ports[1]}") as client:
            _send(client, "S")
            process.send_signal(signal.SIGTERM)
            # Triton alone waits for the END until its time-out, and its status is then 1.
            assert process.wait(GUARD_S) == 0
        assert _are_free(ports)
        assert _regions_of(process.pid) == []


@pytest.mark.live
def test_a_stream_that_still_speaks_may_end_while_oasr_serve_stops() -> None:
    with _serving() as (process, ports):
        with InferenceServerClient(f"127.0.0.1:{ports[1]}") as client:
            _send(client, "S")
            process.send_signal(signal.SIGTERM)
            quiet_from_s = time.monotonic() + 1.5 * QUIET_S
            while time.monotonic() < quiet_from_s:
                time.sleep(QUIET_S / 8)
                _send(client, "")
            _send(client, "E")
        assert process.wait(GUARD_S) == 0


@pytest.mark.live
def test_an_oasr_serve_that_is_killed_takes_its_server_along() -> None:
    with _serving() as (process, ports):
        server = _child_of(process.pid, b"tritonserver")
        assert _regions_of(process.pid) != []
        process.kill()
        process.wait()
        wait_until(lambda: running_in_group(server) == [], what="the server is gone")
        wait_until(lambda: _regions_of(process.pid) == [], what="its shared memory is gone")
        wait_until(lambda: _are_free(ports), what="its ports are free")


@pytest.mark.live
def test_a_model_whose_process_is_killed_ends_oasr_serve_with_the_cause() -> None:
    with _serving(stderr=subprocess.PIPE) as (process, ports):
        stub = _child_of(_child_of(process.pid, b"tritonserver"), b"triton_python_backend_stub")
        os.kill(stub, signal.SIGKILL)
        _, errors = process.communicate(timeout=GUARD_S)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith(f"error: a model's process ({stub}) was ended by signal 9 by itself; ")
    assert _are_free(ports)


@pytest.mark.live
def test_a_model_whose_process_stands_still_ends_oasr_serve_with_the_cause() -> None:
    with _serving("--hang-limit", "10", stderr=subprocess.PIPE) as (process, ports):
        stub = _child_of(_child_of(process.pid, b"tritonserver"), b"triton_python_backend_stub")
        os.kill(stub, signal.SIGSTOP)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith("error: a model hangs: its heartbeat ")
    assert 'model="oasr_streaming"' in last
    assert "has stood still for 10 s; " in last
    assert _are_free(ports)
    assert _regions_of(process.pid) == []


@pytest.mark.live
def test_a_step_that_does_not_return_ends_oasr_serve_though_its_process_runs() -> None:
    """The process's other threads go on: the lock and the interpreter are free."""
    slow = ("--hang-limit", "10", "--set", "debug_slow_step_ms=600000")
    chunk = audio(tritonclient.grpc, np.zeros(32_000, np.int16))
    with (
        _serving(*slow, stderr=subprocess.PIPE) as (process, ports),
        InferenceServerClient(f"127.0.0.1:{ports[1]}") as client,
    ):
        client.async_infer("oasr_streaming", chunk, lambda *_: None, **sequence("stuck", "S"))
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: a model hangs: its heartbeat ")


@pytest.mark.live
def test_a_server_that_is_killed_ends_oasr_serve_with_its_status_and_a_line() -> None:
    with _serving(stderr=subprocess.PIPE) as (process, ports):
        os.kill(_child_of(process.pid, b"tritonserver"), signal.SIGKILL)
        _, errors = process.communicate(timeout=GUARD_S)
    assert process.returncode == 128 + signal.SIGKILL
    last = errors.splitlines()[-1]
    assert last == "error: tritonserver has ended unasked, with status 137"
    assert _are_free(ports)


def _child_of(parent: int, name: bytes) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            program = (process / "cmdline").read_bytes().partition(b"\0")[0]
            its_parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if program.endswith(name) and int(its_parent) == parent:
                return int(process.name)
    raise AssertionError(f"{parent} has no child {name!r}")


def _kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for member in running_in_group(process.pid):
        os.kill(member, signal.SIGKILL)
