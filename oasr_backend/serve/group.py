"""The processes of one process group: a server and its stubs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_POLL_S = 0.01
_WAIT_S = 2.0
# The kernel keeps this much of a program's name.
_STUB_NAME = "triton_python_backend_stub"[:15]


class _Process(NamedTuple):
    process_id: int
    name: str
    state: str
    wait_status: int


def wait_asleep(process: subprocess.Popen[bytes], timeout_s: float | None) -> int:
    """`process.wait(timeout_s)`, which itself wakes twenty times a second to look."""
    if timeout_s is not None:
        # An older kernel has no such descriptor, and a process that was collected has no id.
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(process.pid)
            try:
                select.select([descriptor], [], [], timeout_s)
            finally:
                os.close(descriptor)
            timeout_s = 0.0
    return process.wait(timeout_s)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the group of a process, then a bounded wait until no process in it runs."""
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
    """Ids of the processes of a group, without zombies, which only wait for a parent to look."""
    return [one.process_id for one in _members(group_id) if one.state not in "ZX"]


def dead_stubs(group_id: int) -> dict[int, int]:
    """Stubs of a group that ended and that their server has not collected, by process id.

    The value is the exit status, -N after signal N.
    """
    return {
        one.process_id: os.waitstatus_to_exitcode(one.wait_status)
        for one in _members(group_id)
        if one.state == "Z" and one.name == _STUB_NAME
    }


def _members(group_id: int) -> Iterator[_Process]:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the last parenthesis may itself hold spaces and parentheses.
            head, _, rest = entry.read_text(errors="replace").rpartition(")")
            state, _, group, *_, wait_status = rest.split()
            if int(group) == group_id:
                name = head.partition("(")[2]
                yield _Process(int(entry.parent.name), name, state, int(wait_status))
