"""When a model's process counts as dead or hanging: real processes, real zombies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from oasr_backend.errors import ServerError
from oasr_backend.serve.group import dead_stubs, running_in_group
from oasr_backend.serve.stubs import _LOOKS, _LOOKS_A_PAGE, HeartbeatWatch, StubWatch

# Forks a child of the name that it is told, and does with it what it is told.
SERVER = """
import os, signal, sys
def said():
    return sys.stdin.readline().strip()
name = said()
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    open("/proc/self/comm", "w").write(name)
    os.write(write_end, b"1")
    signal.pause()
os.read(read_end, 1)
print(child, flush=True)
while order := said():
    if order == "collect":
        os.waitpid(child, 0)
    else:
        os.kill(child, int(order))
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    print("done", flush=True)
"""


class Server:
    """A process group with one child, which is killed and collected on demand."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in: IO[str] = process.stdin
        self._out: IO[str] = process.stdout
        self.group = process.pid
        self.child = int(self._order(name))

    def kill(self, number: int = 9) -> None:
        assert self._order(str(number)) == "done"

    def collect(self) -> None:
        assert self._order("collect") == "done"

    def _order(self, text: str) -> str:
        print(text, file=self._in, flush=True)
        return self._out.readline().strip()


@pytest.fixture(name="server")
def _server(request: pytest.FixtureRequest) -> Iterator[Server]:
    name = getattr(request, "param", "triton_python_backend_stub")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        server = Server(process, name)
        yield server
        if server.child in running_in_group(server.group):
            server.kill()


def test_a_stub_that_lives_is_never_taken_for_dead(server: Server) -> None:
    watch = StubWatch(server.group)
    for _ in range(3 * _LOOKS):
        watch.look()
    assert server.child in running_in_group(server.group)


@pytest.mark.parametrize("number", [9, 11])
def test_a_stub_that_stays_dead_is_told_with_its_signal(server: Server, number: int) -> None:
    watch = StubWatch(server.group)
    server.kill(number)
    assert dead_stubs(server.group) == {server.child: -number}
    for _ in range(_LOOKS - 1):
        watch.look()
    with pytest.raises(ServerError, match=rf"\({server.child}\) was ended by signal {number} "):
        watch.look()


def test_a_stub_that_its_server_collects_late_was_told_to_end(server: Server) -> None:
    watch = StubWatch(server.group)
    server.kill()
    for _ in range(_LOOKS - 1):
        watch.look()
    server.collect()
    for _ in range(2 * _LOOKS):
        watch.look()


@pytest.mark.parametrize("server", ["some_helper"], indirect=True)
def test_a_dead_child_that_is_no_stub_is_none_of_our_business(server: Server) -> None:
    watch = StubWatch(server.group)
    server.kill()
    for _ in range(3 * _LOOKS):
        watch.look()


class Metrics:
    """A metrics port: instances by name, with the heartbeat of each; None: it does not answer."""

    def __init__(self, **heartbeats: int) -> None:
        self.heartbeats: dict[str, int] | None = heartbeats

    def page(self) -> str | None:
        if self.heartbeats is None:
            return None
        lines = [
            f'oasr_heartbeat_seconds{{instance="{name}",model="asr"}} {value}'
            for name, value in self.heartbeats.items()
        ]
        return "\n".join(["# TYPE oasr_heartbeat_seconds gauge", *lines, ""])


def read_pages(watch: HeartbeatWatch, count: int) -> None:
    for _ in range(count * _LOOKS_A_PAGE):
        watch.look()


def test_a_heartbeat_that_stands_still_is_told_with_its_instance() -> None:
    metrics = Metrics(a=1, b=1)
    watch = HeartbeatWatch(metrics.page, limit_s=10.0)
    for second in range(5):
        metrics.heartbeats = {"a": 1 + second, "b": 1 + second}
        read_pages(watch, 1)
    metrics.heartbeats = {"a": 9, "b": 5}
    read_pages(watch, 1)
    metrics.heartbeats = {"a": 10, "b": 5}
    with pytest.raises(ServerError, match=r'instance="b".* stood still for 10 s; .*--hang-limit'):
        read_pages(watch, 1)


def test_a_model_that_moves_now_and_then_does_not_hang() -> None:
    metrics = Metrics(a=1)
    watch = HeartbeatWatch(metrics.page, limit_s=10.0)
    for second in range(1, 7):
        metrics.heartbeats = {"a": second}
        read_pages(watch, 2)


def test_an_idle_server_with_its_models_unloaded_or_without_a_page_does_not_hang() -> None:
    metrics = Metrics(a=1)
    watch = HeartbeatWatch(metrics.page, limit_s=10.0)
    read_pages(watch, 2)
    for heartbeats in (None, {}, {"a": 0}, {"a": 0}, {"a": 0}):
        metrics.heartbeats = heartbeats
        read_pages(watch, 1)


def test_without_a_limit_nothing_hangs() -> None:
    watch = HeartbeatWatch(Metrics(a=1).page, limit_s=float("inf"))
    read_pages(watch, 100)
