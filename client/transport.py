"""Four ways to carry one chunk: gRPC or HTTP, blocking or asyncio.

Each has `infer(request, timeout_s)`, which raises nothing but ClientError (and cancellation),
and `close()`. The blocking ones may be used from several threads at once.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gevent  # type: ignore[import-untyped]
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from oasr_client.errors import translate
from oasr_client.wire import ChunkRequest, Reply, infer_arguments, parse_reply

# A ping only while a call waits, and never a third one without data: servers that limit pings
# (Triton: one per 5 minutes without data, two strikes) then have no reason to hang up. The local
# pool gives each client its own connection; the short back-off lets a restarted server be found.
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 2),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_NO_LIMIT_S = 365 * 24 * 3600.0


@dataclass(frozen=True)
class Endpoint:
    """Where the model is and how it is addressed; `headers` go with every request."""

    url: str
    model_name: str
    dtype: str
    want_result: bool
    tls: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, request: ChunkRequest, tensors: Any) -> dict[str, Any]:
        arguments = infer_arguments(
            request, tensors=tensors, dtype=self.dtype, want_result=self.want_result
        )
        # A fresh dict: tritonclient's HTTP clients write their own headers into it.
        return {"model_name": self.model_name, "headers": dict(self.headers), **arguments}

    def reply(self, response: Any) -> Reply:
        return parse_reply(response, want_result=self.want_result)


class GrpcTransport:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = tritonclient.grpc.InferenceServerClient(
            endpoint.url, ssl=endpoint.tls, channel_args=CHANNEL_OPTIONS
        )

    def infer(self, request: ChunkRequest, timeout_s: float) -> Reply:
        arguments = self._endpoint.arguments(request, tritonclient.grpc)
        try:
            response = self._client.infer(client_timeout=timeout_s, **arguments)
        except Exception as error:
            raise translate(error, url=self._endpoint.url, timeout_s=timeout_s) from error
        return self._endpoint.reply(response)

    def close(self) -> None:
        self._client.close()


class HttpTransport:
    """One connection per thread: tritonclient's blocking HTTP client belongs to one thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._of_thread = threading.local()
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()

    def infer(self, request: ChunkRequest, timeout_s: float) -> Reply:
        arguments = self._endpoint.arguments(request, tritonclient.http)
        late = TimeoutError(f"no answer within {timeout_s} s")
        try:
            with gevent.Timeout(timeout_s, late):
                response = self._client().infer(**arguments)
        except tritonclient.http.InferenceServerException as error:
            raise translate(error, url=self._endpoint.url, timeout_s=timeout_s) from error
        except Exception as error:
            self._drop_client()
            raise translate(error, url=self._endpoint.url, timeout_s=timeout_s) from error
        return self._endpoint.reply(response)

    def close(self) -> None:
        for client in list(self._clients):
            client.close()

    def _client(self) -> Any:
        client = getattr(self._of_thread, "client", None)
        if client is None:
            client = tritonclient.http.InferenceServerClient(
                self._endpoint.url,
                ssl=self._endpoint.tls,
                connection_timeout=_NO_LIMIT_S,
                network_timeout=_NO_LIMIT_S,
            )
            self._of_thread.client = client
            self._clients.add(client)
        return client

    def _drop_client(self) -> None:
        # A half-read answer must not be taken for the next request's.
        self._client().close()
        self._of_thread.client = None


class AsyncGrpcTransport:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = tritonclient.grpc.aio.InferenceServerClient(
            endpoint.url, ssl=endpoint.tls, channel_args=CHANNEL_OPTIONS
        )

    async def infer(self, request: ChunkRequest, timeout_s: float) -> Reply:
        arguments = self._endpoint.arguments(request, tritonclient.grpc)
        try:
            response = await self._client.infer(client_timeout=timeout_s, **arguments)
        except Exception as error:
            raise translate(error, url=self._endpoint.url, timeout_s=timeout_s) from error
        return self._endpoint.reply(response)

    async def close(self) -> None:
        await self._client.close()


class AsyncHttpTransport:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = tritonclient.http.aio.InferenceServerClient(
            endpoint.url, ssl=endpoint.tls, conn_limit=0, conn_timeout=_NO_LIMIT_S
        )

    async def infer(self, request: ChunkRequest, timeout_s: float) -> Reply:
        arguments = self._endpoint.arguments(request, tritonclient.http)
        try:
            response = await asyncio.wait_for(self._client.infer(**arguments), timeout_s)
        except Exception as error:
            raise translate(error, url=self._endpoint.url, timeout_s=timeout_s) from error
        return self._endpoint.reply(response)

    async def close(self) -> None:
        await self._client.close()
