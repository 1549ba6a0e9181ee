"""One chunk over HTTP: blocking (from any number of threads) or asyncio.

`infer` raises nothing but ClientError and cancellation.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

import gevent  # type: ignore[import-untyped]
import tritonclient.http
import tritonclient.http.aio

from oasr_client.errors import translate
from oasr_client.wire import ChunkRequest, Endpoint, Reply, parse_reply

# tritonclient's own limits are per connection; the deadline here is per request.
_NO_LIMIT_S = 365 * 24 * 3600.0


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
        return parse_reply(response)

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
        # The next request must not take a half-read answer for its own.
        self._client().close()
        self._of_thread.client = None


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
        return parse_reply(response)

    async def close(self) -> None:
        await self._client.close()
