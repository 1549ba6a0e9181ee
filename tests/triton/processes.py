"""A live server's processes and threads, as the kernel shows them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from benchmarks.chaos.health import stub_processes
from oasr_backend.serve.process import TritonServer


def newest_stub(server: TritonServer) -> int:
    """Process id of the Python stub that was started last."""
    return max(stub_processes(server))


def cores_by_thread(process_id: int) -> dict[str, set[frozenset[int]]]:
    """For each name that threads of the process have: the cores each of them may run on."""
    found: dict[str, set[frozenset[int]]] = {}
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        # A thread may end while its files are read.
        with contextlib.suppress(OSError):
            name = (thread / "comm").read_text().strip()
            cores = frozenset(os.sched_getaffinity(int(thread.name)))
            found.setdefault(name, set()).add(cores)
    return found
