"""What a start of the shipped model leaves behind: a line of its stages, and its memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.health import stub_processes
from oasr_backend.serve.process import TritonServer, local_settings
from tests.conftest import MODEL_REPOSITORY
from tests.guards import GUARD_S, wait_until
from tests.triton.conftest import Pcm16
from tests.triton.wire import Wire

_STAGES = ("import", "check", "read", "build", "self_test", "settle", "total")
_POOL_MIB = 256 * 5 * 239_616 / 2**20
#: PyTorch alone takes 155 MiB of memory that no file backs.
_MOST_MIB = 350


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    """Fresh: what it holds grows with the streams that it has had at once."""
    with TritonServer(local_settings(MODEL_REPOSITORY)) as server:
        server.wait_ready(GUARD_S)
        yield server


def test_the_log_tells_the_stages_of_the_load(server: TritonServer) -> None:
    assert server.log_path is not None

    def line() -> str | None:
        match = re.search(r"event=load_times (.*)", server.log_path.read_text(encoding="utf-8"))
        return match and match[1]

    wait_until(lambda: line() is not None, what="the line is written")
    seconds = dict(part.split("_s=") for part in line().split())
    assert tuple(seconds) == _STAGES
    *stages_s, total_s = map(float, seconds.values())
    assert total_s > 0
    assert sum(stages_s) == pytest.approx(total_s, abs=0.005 * len(_STAGES))


def test_a_model_without_streams_holds_no_memory_for_them(
    server: TritonServer, recordings: list[Pcm16]
) -> None:
    with Wire(server, "oasr_streaming") as wire:
        for pcm in recordings[:4]:
            wire.send(1, pcm, "SE")
    (stub,) = stub_processes(server)
    assert _anonymous_mib(stub) < _MOST_MIB < 155 + _POOL_MIB


def _anonymous_mib(process: int) -> float:
    status = Path("/proc", str(process), "status").read_text(encoding="utf-8")
    return int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)[1]) / 1024


@pytest.fixture(scope="module")
def first_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    """Its user has never started one: no graph is kept."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        with TritonServer(local_settings(MODEL_REPOSITORY)) as server:
            server.wait_ready(GUARD_S)
            yield server


def test_a_first_start_serves_at_once_and_by_its_graph_later(
    first_server: TritonServer, recordings: list[Pcm16], expected: list[str]
) -> None:
    log_path = first_server.log_path
    assert log_path is not None

    def has_told(event: str) -> bool:
        return event in log_path.read_text(encoding="utf-8")

    assert has_told("event=encoder_eager reason=its graph is not made yet")
    texts = list[tuple[int, str]]()
    with Wire(first_server, "oasr_streaming") as wire:

        def is_taken() -> bool:
            number = len(texts) + 1
            texts.append((number % 3, wire.send(number, recordings[number % 3], "SE")))
            assert not has_told("event=graph_not_")
            return has_told("event=graph_taken is_taken=True")

        wait_until(is_taken, what="the graph takes over")
        texts += [(index, wire.send(1000 + index, recordings[index], "SE")) for index in range(3)]
    assert len(texts) > 3
    assert all(text == expected[index] for index, text in texts)
