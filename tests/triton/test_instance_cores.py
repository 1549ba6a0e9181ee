"""A live server whose instance has a core to itself. The machine needs two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from oasr_backend.serve.cores import parse_instance_cores
from oasr_backend.serve.process import TritonServer, local_settings
from tests.conftest import MODEL_REPOSITORY
from tests.guards import GUARD_S
from tests.triton.conftest import Pcm16
from tests.triton.processes import cores_by_thread, newest_stub
from tests.triton.wire import Wire

USABLE = frozenset(os.sched_getaffinity(0))
MINE = frozenset({max(USABLE)})


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    cores = parse_instance_cores(str(max(USABLE)))
    settings = replace(local_settings(MODEL_REPOSITORY), instance_cores=cores)
    with TritonServer(settings) as running:
        running.wait_ready(GUARD_S)
        yield running


def test_the_instance_has_its_core_and_the_callers_threads_have_the_others(
    server: TritonServer,
) -> None:
    model = cores_by_thread(newest_stub(server))
    assert set().union(*model.values()) == {MINE}
    triton = cores_by_thread(server.pid)
    assert MINE in triton["tritonserver"], "the thread that hands requests to the model"
    # gRPC names its threads; those of tritonserver itself all have one name.
    callers = {name: cores for name, cores in triton.items() if name != "tritonserver"}
    assert {"grpc_global_tim", "event_engine"} <= set(callers)
    assert set().union(*callers.values()) == {USABLE - MINE}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_texts_are_those_of_any_other_server(
    server: TritonServer, protocol: str, recordings: list[Pcm16], expected: list[str]
) -> None:
    with Wire(server, "oasr_streaming", protocol) as wire:
        assert wire.send(1, recordings[0], "SE") == expected[0]
