"""Notices a model's process that died or hangs: Triton neither says so nor starts it again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from oasr_backend.errors import ServerError
from oasr_backend.serve.group import dead_stubs

LOOK_INTERVAL_S = 1.0
# Triton collects a stub that it told to end at once, as fast as its threads get to run.
_LOOKS = 5
# A page of metrics takes the server some milliseconds.
_LOOKS_A_PAGE = 5
#: A model that moves does so each second; below this a busy machine could be taken for a hang.
LEAST_HANG_LIMIT_S = 10.0
# The heartbeat of an unloaded model is 0.
_HEARTBEAT = re.compile(r"^oasr_heartbeat_seconds\{(.*)\} ([1-9]\S*)$", re.MULTILINE)


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


class HeartbeatWatch:
    """A model whose heartbeat is the same on every page that it takes to fill the limit hangs.

    Pages are counted, as looks are. One that cannot be read says nothing.
    """

    def __init__(self, read_page: Callable[[], str | None], limit_s: float) -> None:
        """limit_s: seconds without a movement, on a machine that has time to look; inf: any."""
        self._read_page = read_page
        self._limit_s = limit_s
        self._num_looks = 0
        self._values: Mapping[str, str] = {}
        self._standing: Mapping[str, int] = {}

    def look(self) -> None:
        """One look, the fifth of which reads a page. Raises ServerError for a model that hangs."""
        self._num_looks += 1
        if self._num_looks % _LOOKS_A_PAGE == 0 and (page := self._read_page()) is not None:
            self._compare(dict(_HEARTBEAT.findall(page)))

    def _compare(self, values: Mapping[str, str]) -> None:
        same = [labels for labels, value in values.items() if self._values.get(labels) == value]
        self._standing = {labels: self._standing.get(labels, 0) + 1 for labels in same}
        self._values = values
        for labels, num_pages in self._standing.items():
            if num_pages * _LOOKS_A_PAGE * LOOK_INTERVAL_S >= self._limit_s:
                raise ServerError(_standstill(labels, self._limit_s))


def _standstill(labels: str, limit_s: float) -> str:
    return (
        f"a model hangs: its heartbeat {{{labels}}} has stood still for {limit_s:g} s; requests to "
        "it wait for ever or fail, so the server is stopped: start it anew, and look for the cause "
        "in the log above; a model that has slower steps needs a larger --hang-limit"
    )


def _obituary(process_id: int, status: int) -> str:
    end = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return (
        f"a model's process ({process_id}) {end} by itself; every request to its instance fails "
        "and Triton does not start it again, so the server is stopped: start it anew, and look "
        "for the cause in the log above, or in the kernel's if memory ran out"
    )
