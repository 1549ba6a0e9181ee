"""Each failure against real sockets: its error, which comes before a deadline or at it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from echo_helpers import (
    EACH_PROTOCOL,
    FAR_S,
    NO_RESTART,
    SENDERS,
    SendOne,
    settings_for,
    wait_until_freed,
)
from oasr_client import (
    AsyncStreamingClient,
    ClientError,
    DeadlineError,
    OverloadedError,
    RequestRejectedError,
    ServerUnavailableError,
    StreamingClient,
    StreamLostError,
)

from oasr_backend.serve.process import TritonServer


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A socket whose system accepts connections, and behind which no server ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@SENDERS
@EACH_PROTOCOL
def test_nobody_listening_is_told_at_once(send_one: SendOne, protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServerUnavailableError, match=f"127.0.0.1:{port}.*check the address"):
        send_one({"url": f"127.0.0.1:{port}", "protocol": protocol, "timeout_s": FAR_S})


@SENDERS
@EACH_PROTOCOL
def test_the_deadline_holds_where_nobody_answers(
    send_one: SendOne, protocol: str, silent_port: int
) -> None:
    settings = {"url": f"127.0.0.1:{silent_port}", "protocol": protocol, "timeout_s": 0.5}
    started_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"within 0\.5 s.*raise timeout_s"):
        send_one(settings)
    assert time.monotonic() - started_s >= 0.5


@SENDERS
@EACH_PROTOCOL
def test_a_slow_answer_ends_at_the_deadline(
    send_one: SendOne, protocol: str, echo_server: TritonServer
) -> None:
    slow = settings_for(echo_server, protocol, timeout_s=0.3, options={"sleep_ms": 800})
    with pytest.raises(DeadlineError, match=r"within 0\.3 s"):
        send_one(slow)
    wait_until_freed(echo_server)


@SENDERS
@EACH_PROTOCOL
def test_an_unknown_option_is_rejected_by_name(
    send_one: SendOne, protocol: str, echo_server: TritonServer
) -> None:
    with pytest.raises(RequestRejectedError, match="nbset"):
        send_one(settings_for(echo_server, protocol, options={"nbset": 3}))


@SENDERS
@EACH_PROTOCOL
def test_an_unknown_model_is_rejected_by_name(
    send_one: SendOne, protocol: str, echo_server: TritonServer
) -> None:
    settings = settings_for(echo_server, protocol)
    with pytest.raises(RequestRejectedError, match="absent"):
        send_one({**settings, "model_name": "absent"})


@EACH_PROTOCOL
def test_a_server_that_is_killed_is_told_and_never_waited_for(
    protocol: str, doomed_server: TritonServer
) -> None:
    settings = settings_for(doomed_server, protocol, timeout_s=FAR_S)
    with StreamingClient(**settings) as client, client.stream() as stream:
        stream.send(np.zeros(100))
        os.killpg(doomed_server.pid, signal.SIGKILL)
        with pytest.raises(ServerUnavailableError):
            stream.send(np.zeros(100))


@EACH_PROTOCOL
def test_a_server_killed_during_an_answer_is_told(
    protocol: str, doomed_server: TritonServer
) -> None:
    settings = settings_for(doomed_server, protocol, timeout_s=FAR_S, retry=NO_RESTART)

    async def run() -> None:
        async with AsyncStreamingClient(**settings) as client:
            stream = client.stream(options={"sleep_ms": 60_000})
            sending = asyncio.ensure_future(stream.send(np.zeros(100)))
            await asyncio.sleep(0.3)
            os.killpg(doomed_server.pid, signal.SIGKILL)
            with pytest.raises(ServerUnavailableError):
                await sending

    asyncio.run(run())


def test_every_error_is_a_client_error() -> None:
    for kind in (DeadlineError, OverloadedError, RequestRejectedError, StreamLostError):
        assert issubclass(kind, ClientError)
