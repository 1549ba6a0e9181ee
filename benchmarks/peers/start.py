"""How long each server takes until it is ready, and how much memory it then holds.

The servers start one after the other, by turns, each alone; their files lie in the page cache after
the first round, which is not counted. Ready means for ours that Triton's health page says so, for
the peer that it takes connections, which it does once its model is loaded. Memory is that of all
processes of the server: PSS shares a page among those that map it, RSS counts it for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.peers import processes
from benchmarks.peers.choices import Choices
from benchmarks.peers.servers import RunningServer, Server
from benchmarks.report import Figure

_MAX_ROUNDS = 3


@dataclass
class _Starts:
    ready_s: list[float] = field(default_factory=list)
    pss_mib: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)


def measure(servers: Sequence[Server], choices: Choices) -> list[Figure]:
    """Raises ServerError for a server that does not get ready."""
    starts = {server.name: _Starts() for server in servers}
    num_rounds = min(choices.num_rounds, _MAX_ROUNDS)
    for number in range(num_rounds + 1):
        for server in servers:
            with RunningServer(server) as running:
                ready_s = running.wait_ready()
                memory = processes.memory(running.pid)
            if number > 0:
                starts[server.name].ready_s.append(ready_s)
                starts[server.name].pss_mib.append(memory.pss_mib)
                starts[server.name].rss_mib.append(memory.rss_mib)
    return [figure for name, one in starts.items() for figure in _figures(name, one)]


def _figures(name: str, starts: _Starts) -> list[Figure]:
    return [
        Figure(f"start: {name}, ready", "s", starts.ready_s),
        Figure(f"start: {name}, PSS", "MiB", starts.pss_mib),
        Figure(f"start: {name}, RSS", "MiB", starts.rss_mib),
    ]
