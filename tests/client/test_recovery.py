"""What the client mends by itself, against a real server."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import numpy as np
import pytest
from echo_helpers import (
    EACH_PROTOCOL,
    NO_RESTART,
    settings_for,
    wait_until_forgotten,
    wait_until_freed,
)
from oasr_client import (
    OverloadedError,
    RetryPolicy,
    StreamingClient,
    StreamLostError,
)

from oasr_backend.serve.process import TritonServer
from tests.guards import GUARD_S


@EACH_PROTOCOL
def test_a_stream_outlives_its_server_without_losing_a_sample(
    protocol: str, doomed_server: TritonServer
) -> None:
    patient = RetryPolicy(start_attempts=5000, backoff_s=0.1, max_backoff_s=0.2)
    settings = settings_for(doomed_server, protocol, retry=patient)
    successor = TritonServer(doomed_server.settings)
    with contextlib.ExitStack() as cleanup:
        # Stopped after the client has hung up: Triton waits for open HTTP connections.
        cleanup.push(successor)
        with StreamingClient(**settings) as client, client.stream() as stream:
            stream.send(np.zeros(100))
            stream.send(np.zeros(200))
            os.killpg(doomed_server.pid, signal.SIGKILL)
            doomed_server.wait(GUARD_S)
            successor.start()
            final = stream.finish(np.zeros(3))
    assert (final.text, final.segment) == ("heard 303", 0)


@EACH_PROTOCOL
def test_an_idle_stream_is_started_again_whole(protocol: str, echo_server: TritonServer) -> None:
    settings = settings_for(echo_server, protocol, options={"label": "a"})
    with StreamingClient(**settings) as client, client.stream("idler") as stream:
        stream.send(np.zeros(100))
        wait_until_forgotten(echo_server)
        final = stream.finish(np.zeros(20))
    assert (final.text, final.segment) == ("a heard 120", 0)


def test_a_long_idle_stream_goes_on_as_a_second_segment(echo_server: TritonServer) -> None:
    settings = settings_for(echo_server, "grpc", retry=RetryPolicy(replay_limit_s=0.0))
    with StreamingClient(**settings) as client, client.stream() as stream:
        stream.send(np.zeros(100))
        wait_until_forgotten(echo_server)
        final = stream.finish(np.zeros(20))
    assert (final.text, final.segment) == ("heard 100 heard 20", 1)


@EACH_PROTOCOL
def test_an_idle_stream_without_restarts_is_told_lost(
    protocol: str, echo_server: TritonServer
) -> None:
    settings = settings_for(echo_server, protocol, retry=NO_RESTART)
    with StreamingClient(**settings) as client, client.stream() as stream:
        stream.send(np.zeros(100))
        wait_until_forgotten(echo_server)
        with pytest.raises(StreamLostError, match="RetryPolicy"):
            stream.finish(np.zeros(20))


@EACH_PROTOCOL
def test_a_failed_step_is_repaired_by_a_restart(protocol: str, echo_server: TritonServer) -> None:
    settings = settings_for(echo_server, protocol, options={"fail_at": 3})
    with StreamingClient(**settings) as client, client.stream() as stream:
        texts = [stream.send(np.zeros(10)).text for _ in range(3)]
    assert texts == ["heard 10", "heard 20", "heard 30"]


@EACH_PROTOCOL
def test_an_overloaded_server_is_told_at_once(protocol: str, echo_server: TritonServer) -> None:
    wait_until_freed(echo_server)
    with StreamingClient(**settings_for(echo_server, protocol)) as client:
        running = [client.stream() for _ in range(4)]
        for stream in running:
            stream.send(np.zeros(10))
        with pytest.raises(OverloadedError, match="all 4 streams"), client.stream() as fifth:
            fifth.send(np.zeros(10))
        assert [stream.finish().text for stream in running] == ["heard 10"] * 4


def test_an_overloaded_server_is_asked_again_when_allowed(echo_server: TritonServer) -> None:
    wait_until_freed(echo_server)
    patient = RetryPolicy(start_attempts=5000, backoff_s=0.05, max_backoff_s=0.1)
    with StreamingClient(**settings_for(echo_server, "grpc", retry=patient)) as client:
        running = [client.stream() for _ in range(4)]
        for stream in running:
            stream.send(np.zeros(10))
        timer = threading.Timer(0.3, running[0].finish)
        timer.start()
        with client.stream() as fifth:
            assert fifth.finish(np.zeros(7)).text == "heard 7"
        timer.join()
        for stream in running:
            stream.abandon()
