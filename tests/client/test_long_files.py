"""The client's memory for an hour of audio."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from oasr_backend.serve.process import TritonServer

HOUR_S = 3600
RATE_HZ = 48000
MAX_RSS_KB = 200_000

#: The high-water mark of this process alone: its parent's does not count, as in `getrusage`.
MEASURED = """
import atexit, re, sys
@atexit.register
def tell():
    with open("/proc/self/status") as status:
        sys.stderr.write(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1])
from oasr_client.__main__ import main
main()
"""


@pytest.fixture
def hour(tmp_path: Path) -> Path:
    """An hour of 48 kHz stereo, 691 MB of which the disk holds none."""
    path, frame_bytes = tmp_path / "hour.wav", 4
    num_bytes = HOUR_S * RATE_HZ * frame_bytes
    form = struct.pack("<HHIIHH", 1, 2, RATE_HZ, RATE_HZ * frame_bytes, frame_bytes, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data"
    with path.open("wb") as file:
        file.write(b"RIFF" + struct.pack("<I", 36 + num_bytes) + chunks)
        file.write(struct.pack("<I", num_bytes))
        file.truncate(44 + num_bytes)
    return path


@pytest.mark.slow
def test_an_hour_is_heard_in_less_than_200_mb(echo_server: TritonServer, hour: Path) -> None:
    command = [sys.executable, "-c", MEASURED, "--url", echo_server.grpc_url, "--model", "echo"]
    command += ["--chunk-ms", "10000", str(hour)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == f"heard {HOUR_S * 16000}\n"
    assert int(done.stderr) < MAX_RSS_KB
