"""Ends a server whose owner was killed and could not stop it."""

from __future__ import annotations

import contextlib
import subprocess

from oasr_backend.serve.shm import SHM_DIRECTORY

# The pipe ends when the last process that holds its other end does, however it ends.
_SCRIPT = 'read -r _; kill -s KILL -- "-$1"; rm -f -- "$2"*'


class OwnerGuard:
    """A shell that waits for the end of this process, then kills a process group.

    The kernel's own parent-death signal would come when the *thread* that started the server ends.
    A process that this one forks without an exec holds the pipe too and so delays the guard.
    """

    def __init__(self, group_id: int, region_prefix: str) -> None:
        """`region_prefix` names the shared-memory regions that go with the group."""
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "oasr-guard", str(group_id), SHM_DIRECTORY / region_prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Signals that a terminal sends to the owner's group are not meant for the guard.
            start_new_session=True,
        )

    def release(self) -> None:
        """Tells the guard that the group is gone, so that it kills nothing any more. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
