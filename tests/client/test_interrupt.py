"""Ctrl-C in the command's first and last moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards import GUARD_S

MODULE = [sys.executable, "-m", "oasr_client"]
SCRIPT = [str(Path(sys.executable).with_name("oasr-client"))]

#: Stops the imports at their first library, so that the signal surely comes during them.
SLOW_IMPORT = """
import sys, time
print("importing", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize("library", ["typer", "numpy", "soundfile", "rich"])
def test_ctrl_c_during_the_imports_is_one_line(
    tmp_path: Path, command: list[str], library: str
) -> None:
    (tmp_path / f"{library}.py").write_text(SLOW_IMPORT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "a.wav"], env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GUARD_S)
    assert (process.returncode, errors) == (130, "oasr-client: cancelled\n")


IGNORING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from oasr_client.interrupt import quit_on_interrupt
quit_on_interrupt()
os.kill(os.getpid(), signal.SIGINT)
print("alive")
"""


def test_a_shell_that_lets_it_ignore_ctrl_c_is_obeyed() -> None:
    command = [sys.executable, "-c", IGNORING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=True)
    assert done.stdout == "alive\n"


def test_the_package_itself_imports_no_library() -> None:
    script = "import sys, oasr_client.__main__; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=True)
    tops = {name.partition(".")[0] for name in done.stdout.split()}
    assert not tops & {"numpy", "soundfile", "soxr", "tritonclient", "typer", "rich", "asyncio"}
