"""Each failure against real sockets: who answers what, how fast, and what stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from oasr_client import (
    AsyncStreamingClient,
    ClientError,
    DeadlineError,
    OverloadedError,
    RequestRejectedError,
    RetryPolicy,
    ServerUnavailableError,
    StreamingClient,
    StreamLostError,
    StreamUpdate,
)

from oasr_backend.serve.process import TritonServer

PROTOCOLS = ["grpc", "http"]
NO_RESTART = RetryPolicy(max_restarts=0)
PROMPT_S = 6.0


def url_of(server: TritonServer, protocol: str) -> str:
    return server.grpc_url if protocol == "grpc" else server.http_url


def settings_for(server: TritonServer, protocol: str, **more: Any) -> dict[str, Any]:
    url = url_of(server, protocol)
    return {"url": url, "protocol": protocol, "model_name": "echo", "want_result": True, **more}


def live_streams(server: TritonServer) -> int:
    """Streams that the model holds besides the one that asks."""
    with StreamingClient(**settings_for(server, "grpc")) as client, client.stream() as stream:
        result = stream.finish().result
    assert result is not None
    return int(result["live_streams"])


def wait_until_freed(server: TritonServer) -> None:
    deadline_s = time.monotonic() + 2.0
    while live_streams(server) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert live_streams(server) == 0


def send_one_blocking(settings: dict[str, Any]) -> StreamUpdate:
    with StreamingClient(**settings) as client, client.stream() as stream:
        return stream.finish(np.zeros(100))


def send_one_asyncio(settings: dict[str, Any]) -> StreamUpdate:
    async def send() -> StreamUpdate:
        async with AsyncStreamingClient(**settings) as client, client.stream() as stream:
            return await stream.finish(np.zeros(100))

    return asyncio.run(send())


SENDERS = pytest.mark.parametrize("send_one", [send_one_blocking, send_one_asyncio])
EACH_PROTOCOL = pytest.mark.parametrize("protocol", PROTOCOLS)
SendOne = Callable[[dict[str, Any]], StreamUpdate]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A socket whose system accepts connections and where nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@SENDERS
@EACH_PROTOCOL
def test_nobody_listening_is_told_at_once(send_one: SendOne, protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started_s = time.monotonic()
    with pytest.raises(ServerUnavailableError, match=f"127.0.0.1:{port}.*check the address"):
        send_one({"url": f"127.0.0.1:{port}", "protocol": protocol})
    assert time.monotonic() - started_s < PROMPT_S


@SENDERS
@EACH_PROTOCOL
def test_the_deadline_holds_where_nobody_answers(
    send_one: SendOne, protocol: str, silent_port: int
) -> None:
    settings = {"url": f"127.0.0.1:{silent_port}", "protocol": protocol, "timeout_s": 0.5}
    started_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"within 0\.5 s.*raise timeout_s"):
        send_one(settings)
    # The deadline of the request and the one of the END that follows.
    assert 0.5 <= time.monotonic() - started_s < 2 * 0.5 + PROMPT_S


@pytest.mark.triton
@SENDERS
@EACH_PROTOCOL
def test_a_slow_answer_ends_at_the_deadline(
    send_one: SendOne, protocol: str, echo_server: TritonServer
) -> None:
    slow = settings_for(echo_server, protocol, timeout_s=0.3, options={"sleep_ms": 800})
    started_s = time.monotonic()
    with pytest.raises(DeadlineError):
        send_one(slow)
    assert time.monotonic() - started_s < 2 * 0.3 + PROMPT_S
    wait_until_freed(echo_server)


@pytest.mark.triton
@SENDERS
@EACH_PROTOCOL
def test_an_unknown_option_is_rejected_by_name(
    send_one: SendOne, protocol: str, echo_server: TritonServer
) -> None:
    with pytest.raises(RequestRejectedError, match="nbset"):
        send_one(settings_for(echo_server, protocol, options={"nbset": 3}))


@pytest.mark.triton
@SENDERS
@EACH_PROTOCOL
def test_an_unknown_model_is_rejected_by_name(
    send_one: SendOne, protocol: str, echo_server: TritonServer
) -> None:
    settings = settings_for(echo_server, protocol)
    with pytest.raises(RequestRejectedError, match="absent"):
        send_one({**settings, "model_name": "absent"})


@pytest.mark.triton
@EACH_PROTOCOL
def test_a_server_that_is_killed_is_told_and_never_waited_for(
    protocol: str, doomed_server: TritonServer
) -> None:
    settings = settings_for(doomed_server, protocol, timeout_s=20.0)
    with StreamingClient(**settings) as client, client.stream() as stream:
        stream.send(np.zeros(100))
        os.killpg(doomed_server.pid, signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(ServerUnavailableError):
            stream.send(np.zeros(100))
    assert time.monotonic() - started_s < PROMPT_S


@pytest.mark.triton
@EACH_PROTOCOL
def test_a_server_killed_during_an_answer_is_told(
    protocol: str, doomed_server: TritonServer
) -> None:
    settings = settings_for(doomed_server, protocol, timeout_s=20.0, retry=NO_RESTART)

    async def run() -> None:
        async with AsyncStreamingClient(**settings) as client:
            stream = client.stream(options={"sleep_ms": 10_000})
            sending = asyncio.ensure_future(stream.send(np.zeros(100)))
            await asyncio.sleep(0.3)
            os.killpg(doomed_server.pid, signal.SIGKILL)
            with pytest.raises(ServerUnavailableError):
                await asyncio.wait_for(sending, PROMPT_S)

    asyncio.run(run())


@pytest.mark.triton
@EACH_PROTOCOL
def test_a_stream_outlives_its_server_without_losing_a_sample(
    protocol: str, doomed_server: TritonServer
) -> None:
    patient = RetryPolicy(start_attempts=100, backoff_s=0.1, max_backoff_s=0.2)
    settings = settings_for(doomed_server, protocol, retry=patient)
    successor = TritonServer(doomed_server.settings)
    with contextlib.ExitStack() as cleanup:
        # Stopped after the client has hung up: Triton waits for open HTTP connections.
        cleanup.push(successor)
        with StreamingClient(**settings) as client, client.stream() as stream:
            stream.send(np.zeros(100))
            stream.send(np.zeros(200))
            os.killpg(doomed_server.pid, signal.SIGKILL)
            doomed_server.wait(10)
            successor.start()
            final = stream.finish(np.zeros(3))
    assert (final.text, final.segment) == ("heard 303", 0)


@pytest.mark.triton
@EACH_PROTOCOL
def test_an_idle_stream_is_started_again_whole(protocol: str, echo_server: TritonServer) -> None:
    settings = settings_for(echo_server, protocol, options={"label": "a"})
    with StreamingClient(**settings) as client, client.stream("idler") as stream:
        stream.send(np.zeros(100))
        time.sleep(2.0)
        final = stream.finish(np.zeros(20))
    assert (final.text, final.segment) == ("a heard 120", 0)


@pytest.mark.triton
def test_a_long_idle_stream_goes_on_as_a_second_segment(echo_server: TritonServer) -> None:
    settings = settings_for(echo_server, "grpc", retry=RetryPolicy(replay_limit_s=0.0))
    with StreamingClient(**settings) as client, client.stream() as stream:
        stream.send(np.zeros(100))
        time.sleep(2.0)
        final = stream.finish(np.zeros(20))
    assert (final.text, final.segment) == ("heard 100 heard 20", 1)


@pytest.mark.triton
@EACH_PROTOCOL
def test_an_idle_stream_without_restarts_is_told_lost(
    protocol: str, echo_server: TritonServer
) -> None:
    settings = settings_for(echo_server, protocol, retry=NO_RESTART)
    with StreamingClient(**settings) as client, client.stream() as stream:
        stream.send(np.zeros(100))
        time.sleep(2.0)
        with pytest.raises(StreamLostError, match="RetryPolicy"):
            stream.finish(np.zeros(20))


@pytest.mark.triton
@EACH_PROTOCOL
def test_a_failed_step_is_repaired_by_a_restart(protocol: str, echo_server: TritonServer) -> None:
    settings = settings_for(echo_server, protocol, options={"fail_at": 3})
    with StreamingClient(**settings) as client, client.stream() as stream:
        texts = [stream.send(np.zeros(10)).text for _ in range(3)]
    assert texts == ["heard 10", "heard 20", "heard 30"]


@pytest.mark.triton
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


@pytest.mark.triton
def test_an_overloaded_server_is_asked_again_when_allowed(echo_server: TritonServer) -> None:
    wait_until_freed(echo_server)
    patient = RetryPolicy(start_attempts=50, backoff_s=0.05, max_backoff_s=0.1)
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


@pytest.mark.triton
@EACH_PROTOCOL
def test_a_stream_left_by_an_exception_is_freed_at_once(
    protocol: str, echo_server: TritonServer
) -> None:
    wait_until_freed(echo_server)

    def talk_and_fail() -> None:
        settings = settings_for(echo_server, protocol)
        with StreamingClient(**settings) as client, client.stream() as stream:
            stream.send(np.zeros(10))
            raise KeyError

    with pytest.raises(KeyError):
        talk_and_fail()
    assert live_streams(echo_server) == 0


BLOCKED_CALLER = """
import sys, numpy
from oasr_client import StreamingClient
url, protocol = sys.argv[1:]
options = {"sleep_ms": 700}
client = StreamingClient(url, protocol=protocol, model_name="echo", options=options)
with client.stream() as stream:
    print("sending", flush=True)
    stream.send(numpy.zeros(10))
"""


@pytest.mark.triton
@EACH_PROTOCOL
def test_ctrl_c_leaves_a_blocking_call_and_frees_its_stream(
    protocol: str, echo_server: TritonServer
) -> None:
    wait_until_freed(echo_server)
    command = [sys.executable, "-c", BLOCKED_CALLER, url_of(echo_server, protocol), protocol]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3)
        started_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert time.monotonic() - started_s < PROMPT_S
    assert "KeyboardInterrupt" in errors
    wait_until_freed(echo_server)


@pytest.mark.triton
@EACH_PROTOCOL
def test_a_cancelled_task_frees_its_stream_at_once(
    protocol: str, echo_server: TritonServer
) -> None:
    wait_until_freed(echo_server)
    settings = settings_for(echo_server, protocol, options={"sleep_ms": 200})

    async def talk(client: AsyncStreamingClient) -> None:
        async with client.stream() as stream:
            while True:
                await stream.send(np.zeros(10))

    async def run() -> None:
        async with AsyncStreamingClient(**settings) as client:
            task = asyncio.ensure_future(talk(client))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert live_streams(echo_server) == 0


@pytest.mark.triton
@EACH_PROTOCOL
def test_one_client_serves_many_threads(protocol: str, echo_server: TritonServer) -> None:
    texts: dict[int, str] = {}

    def talk(client: StreamingClient, number: int) -> None:
        with client.stream() as stream:
            for _ in range(20):
                stream.send(np.zeros(number))
            texts[number] = stream.finish().text

    with StreamingClient(**settings_for(echo_server, protocol)) as client:
        threads = [threading.Thread(target=talk, args=(client, n)) for n in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {n: f"heard {20 * n}" for n in (1, 2, 3, 4)}


@pytest.mark.triton
@SENDERS
@EACH_PROTOCOL
@pytest.mark.parametrize("dtype", ["pcm16", "fp32"])
def test_samples_options_and_empty_audio_arrive(
    send_one: SendOne, protocol: str, dtype: str, echo_server: TritonServer
) -> None:
    options = {"label": "héllo", "sleep_ms": 1}
    settings = settings_for(echo_server, protocol, dtype=dtype, options=options)
    assert send_one(settings).result["options"] == options  # type: ignore[index]
    with StreamingClient(**settings) as client, client.stream(2**63 - 1) as stream:
        loud = stream.send(np.full(50, 0.5)).result
        final = stream.finish()
    assert loud is not None
    assert math.isclose(loud["mean"], 0.5, abs_tol=1e-4)
    assert final.text == "héllo heard 50"
    with StreamingClient(**settings) as client, client.stream("text-id") as stream:
        assert stream.finish().text == "héllo heard 0"


def test_every_error_is_a_client_error() -> None:
    for kind in (DeadlineError, OverloadedError, RequestRejectedError, StreamLostError):
        assert issubclass(kind, ClientError)
