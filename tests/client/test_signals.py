"""Ctrl-C and SIGTERM during `oasr-client`: every stream that is open then ends on the server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from echo_helpers import live_streams, wait_until_freed

from oasr_backend.serve.process import TritonServer
from tests.guards import GUARD_S

LONG_S = 30


@pytest.fixture
def long_recordings(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.wav" for name in "abc"]
    for path in paths:
        soundfile.write(path, np.zeros(LONG_S * 16000), 16000)
    return paths


def read_until_heard(process: subprocess.Popen[str], *, num_files: int) -> None:
    """Waits until each of so many files has had an answer."""
    assert process.stdout is not None
    heard: set[str] = set()
    while len(heard) < num_files:
        heard.add(json.loads(process.stdout.readline())["file"])


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
@pytest.mark.parametrize(("num_files", "parallel"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_a_signal_frees_the_streams_whatever_else_waits(
    echo_server: TritonServer,
    long_recordings: list[Path],
    num_files: int,
    parallel: int,
    number: int,
    status: int,
) -> None:
    wait_until_freed(echo_server)
    command = [sys.executable, "-m", "oasr_client", "--url", echo_server.grpc_url]
    command += ["--model", "echo", "--json", "--realtime", "--chunk-ms", "100"]
    command += ["--parallel", str(parallel), *map(str, long_recordings[:num_files])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        read_until_heard(process, num_files=min(num_files, parallel))
        process.send_signal(number)
        _, errors = process.communicate(timeout=GUARD_S)
    assert (process.returncode, errors) == (status, "oasr-client: cancelled\n")
    assert live_streams(echo_server) == 0
