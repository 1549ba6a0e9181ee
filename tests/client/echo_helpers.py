"""Clients that talk to the echo model in every way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oasr_client import (
    AsyncStreamingClient,
    RetryPolicy,
    StreamingClient,
    StreamLostError,
    StreamUpdate,
)

from oasr_backend.serve.process import TritonServer
from tests.guards import wait_until

PROTOCOLS = ["grpc", "http"]
NO_RESTART = RetryPolicy(max_restarts=0)
#: The echo model's config.pbtxt has the same limit.
TRITON_IDLE_S = 1.5
#: No test waits for this deadline, so an error that comes sooner is another one.
FAR_S = 600.0


def url_of(server: TritonServer, protocol: str) -> str:
    return server.grpc_url if protocol == "grpc" else server.http_url


def settings_for(server: TritonServer, protocol: str, **more: Any) -> dict[str, Any]:
    url = url_of(server, protocol)
    return {"url": url, "protocol": protocol, "model_name": "echo", "want_result": True, **more}


def live_streams(server: TritonServer) -> int:
    """The number of streams that the model holds besides the one that asks."""
    with StreamingClient(**settings_for(server, "grpc")) as client, client.stream() as stream:
        result = stream.finish().result
    assert result is not None
    return int(result["live_streams"])


def wait_until_freed(server: TritonServer) -> None:
    wait_until(lambda: live_streams(server) == 0, what="every stream is freed")


def wait_until_forgotten(server: TritonServer) -> None:
    """Waits until Triton has forgotten all streams that were used last before this call.

    A stream that begins later gets no request for its limit: when Triton drops it, all are gone.
    """
    while True:
        with StreamingClient(**settings_for(server, "grpc", retry=NO_RESTART)) as client:
            stream = client.stream()
            stream.send(np.zeros(1))
            time.sleep(1.2 * TRITON_IDLE_S)
            try:
                stream.finish()
            except StreamLostError:
                return


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
