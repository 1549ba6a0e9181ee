"""Notices a model's process that died by itself: Triton neither says so nor starts it again."""

from __future__ import annotations

from collections.abc import Mapping

from oasr_backend.errors import ServerError
from oasr_backend.serve.group import dead_stubs

LOOK_INTERVAL_S = 1.0
# Triton collects a stub that it told to end at once, as fast as its threads get to run.
_LOOKS = 5


class StubWatch:
    """A stub found dead at five looks in a row is one that Triton knows nothing of.

    Looks are counted, not seconds: a machine that stood still in between has seen nothing twice.
    """

    def __init__(self, group_id: int) -> None:
        self._group_id = group_id
        self._looks: Mapping[int, int] = {}

    def look(self) -> None:
        """One look at the group's processes. Raises ServerError for a stub that is dead."""
        dead = dead_stubs(self._group_id)
        self._looks = {process_id: self._looks.get(process_id, 0) + 1 for process_id in dead}
        for process_id, looks in self._looks.items():
            if looks >= _LOOKS:
                raise ServerError(_obituary(process_id, dead[process_id]))


def _obituary(process_id: int, status: int) -> str:
    end = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return (
        f"a model's process ({process_id}) {end} by itself; every request to its instance fails "
        "and Triton does not start it again, so the server is stopped: start it anew, and look "
        "for the cause in the log above, or in the kernel's if memory ran out"
    )
