"""The processes of one process group: a server and its stubs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

_POLL_S = 0.01
_WAIT_S = 2.0


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the group of a process, then a bounded wait until nobody in it runs."""
    deadline_s = time.monotonic() + _WAIT_S
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            if not running_in_group(process.pid) or time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
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
