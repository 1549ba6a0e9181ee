"""The losses that the client mends by itself, against a real server."""

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
        # The server stops after the client has hung up: Triton waits for open HTTP connections.
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


def test_a_long_idle_stream_goes_on_as_a_second_part(echo_server: TritonServer) -> None:
    policy = RetryPolicy(replay_limit_s=0.0)
    settings = settings_for(echo_server, "grpc", retry=policy, options={"word_times": True})
    with StreamingClient(**settings) as client, client.stream() as stream:
        stream.send(np.zeros(32000))
        wait_until_forgotten(echo_server)
        final = stream.finish(np.zeros(8000))
    assert (final.text, final.segment) == ("heard 32000 heard 8000", 1)
    assert final.result is not None
    assert (final.result["text"], final.result["audio_s"]) == (final.text, 2.5)
    words = [(word["word"], word["start_s"], word["end_s"]) for word in final.result["words"]]
    assert words == [
        ("heard", 0.0, 0.25),
        ("32000", 1.25, 1.5),
        ("heard", 2.0, 2.25),
        ("8000", 3.25, 3.5),
    ]


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


@EACH_PROTOCOL
def test_a_stream_that_ends_at_its_longest_length_goes_on_behind_it(
    protocol: str, echo_server: TritonServer
) -> None:
    settings = settings_for(echo_server, protocol, options={"longest": 8000})
    with StreamingClient(**settings) as client, client.stream() as stream:
        texts = [stream.send(np.zeros(7000)).text, stream.send(np.zeros(7000)).text]
        final = stream.finish(np.zeros(6000))
    assert texts == ["heard 7000", "heard 8000 heard 6000"]
    assert final.text == "heard 8000 heard 8000 heard 4000"
    assert final.result is not None
    assert (final.result["audio_s"], final.result["finish_reason"]) == (1.25, "end")
    wait_until_freed(echo_server)
