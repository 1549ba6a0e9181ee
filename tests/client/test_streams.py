"""Many streams, threads and ways to leave one: all samples arrive and no stream stays open."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from echo_helpers import (
    EACH_PROTOCOL,
    SENDERS,
    SendOne,
    live_streams,
    settings_for,
    url_of,
    wait_until_freed,
)
from oasr_client import (
    AsyncStreamingClient,
    StreamingClient,
    StreamStateError,
)

from oasr_backend.serve.process import TritonServer
from tests.guards import GUARD_S


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
    while True:
        stream.send(numpy.zeros(10))
"""


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
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GUARD_S)
    assert "KeyboardInterrupt" in errors
    wait_until_freed(echo_server)


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


@EACH_PROTOCOL
def test_a_client_in_another_event_loop_is_told_so(
    protocol: str, echo_server: TritonServer
) -> None:
    # A client that is made outside of any loop belongs to the first that uses it.
    client = AsyncStreamingClient(**settings_for(echo_server, protocol))

    async def talk() -> str:
        async with client.stream() as stream:
            await stream.send(np.zeros(10))
            return (await stream.finish()).text

    with contextlib.closing(asyncio.new_event_loop()) as first:
        assert first.run_until_complete(talk()) == "heard 10"
        with contextlib.closing(asyncio.new_event_loop()) as second:
            for use in (talk, client.close):
                with pytest.raises(StreamStateError, match="belongs to another event loop"):
                    second.run_until_complete(use())
        assert first.run_until_complete(talk()) == "heard 10"
        first.run_until_complete(client.close())
    assert live_streams(echo_server) == 0


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
