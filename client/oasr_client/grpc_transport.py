"""One chunk over gRPC, unary: blocking (from any number of threads) or asyncio.

`infer` raises nothing but ClientError and cancellation.
"""

from __future__ import annotations

import tritonclient.grpc
import tritonclient.grpc.aio

from oasr_client.errors import translate
from oasr_client.wire import ChunkRequest, Endpoint, Reply, parse_reply

# The channel pings only while a call waits, and at most twice without data. Servers that limit
# pings (Triton: one per 5 minutes without data, two strikes) then have no reason to hang up. The
# local pool gives each client its own connection. The short back-off finds a restarted server.
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
        return parse_reply(response)

    def close(self) -> None:
        self._client.close()


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
        return parse_reply(response)

    async def close(self) -> None:
        await self._client.close()
