"""The programs that client/README.md shows, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from oasr_backend.serve.process import TritonServer
from tests.guards import GUARD_S

README = Path(__file__).parents[2] / "client" / "README.md"
URL = "127.0.0.1:8001"


def run_example(needle: str, server: TritonServer, *, cwd: Path) -> list[str]:
    """The lines that the program holding `needle` prints when its server is the echo model."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (program,) = [block for block in blocks if needle in block]
    program = program.replace(f'"{URL}"', f'"{server.grpc_url}", **MORE')
    program = program.replace("oasr_streaming", "echo")
    more = {"model_name": "echo"} if "StreamingClient" in program else {}
    command = [sys.executable, "-c", f"MORE = {more}\n{program}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=GUARD_S, check=True, cwd=cwd
    )
    return done.stdout.splitlines()


def test_the_class_example_prints_each_partial_and_the_final(
    echo_server: TritonServer, recording: Path
) -> None:
    recording.rename(recording.with_name("talk.wav"))
    lines = run_example("StreamingClient", echo_server, cwd=recording.parent)
    assert lines == ["heard 10240", "heard 20480", "heard 24000", "heard 24000"]


def test_the_plain_example_shows_the_words_of_a_recording(
    echo_server: TritonServer, tmp_path: Path
) -> None:
    (line,) = run_example("tritonclient", echo_server, cwd=tmp_path)
    document = json.loads(line)
    assert document["is_final"]
    assert document["words"]
    assert document["live_streams"] == 0
