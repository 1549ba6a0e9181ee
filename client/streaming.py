"""Speech to a streaming model on Triton, blocking or with asyncio.

    with StreamingClient() as client, client.stream() as stream:
        for chunk in chunks:
            print(stream.send(chunk).text)
        print(stream.finish().text)

`AsyncStreamingClient` has the same names, awaited. A stream that is left without `finish` (an
exception, a cancelled task, Ctrl-C) sends END with a short deadline, so that the server frees it
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import numpy.typing as npt
from oasr_client.errors import ClientError
from oasr_client.session import Exchange, Pause, RetryPolicy, Session, StreamUpdate, advance
from oasr_client.transport import (
    AsyncGrpcTransport,
    AsyncHttpTransport,
    Endpoint,
    GrpcTransport,
    HttpTransport,
)
from oasr_client.wire import ChunkRequest, OptionValue, Reply, SequenceId

ABANDON_TIMEOUT_S = 1.0
_DEFAULT_URLS = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}
_Transport = GrpcTransport | HttpTransport
_AsyncTransport = AsyncGrpcTransport | AsyncHttpTransport


@dataclass(frozen=True)
class ClientSettings:
    """What both clients are made with.

    `url` is host:port without a scheme; None means this machine and the protocol's usual port.
    `dtype` is the wire's: pcm16 has half the bytes of fp32. `timeout_s` is the deadline of one
    request. `options` are request parameters of every stream's START. `want_result` asks for the
    RESULT document with each answer. Raises ClientError for a setting that cannot work.
    """

    url: str | None = None
    protocol: Literal["grpc", "http"] = "grpc"
    model_name: str = "oasr_streaming"
    dtype: Literal["pcm16", "fp32"] = "pcm16"
    timeout_s: float = 30.0
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    want_result: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    tls: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("protocol", self.protocol, ("grpc", "http"))
        _check_choice("dtype", self.dtype, ("pcm16", "fp32"))
        if self.url is not None and "://" in self.url:
            raise ClientError(
                f"url {self.url!r} has a scheme; write host:port, and protocol= for the scheme"
            )
        if not self.timeout_s > 0:
            raise ClientError(f"timeout_s is {self.timeout_s}, it must be above 0")

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            url=self.url or _DEFAULT_URLS[self.protocol],
            model_name=self.model_name,
            dtype=self.dtype,
            want_result=self.want_result,
            tls=self.tls,
            headers=self.headers,
        )

    def session(
        self, sequence_id: SequenceId | None, options: Mapping[str, OptionValue] | None
    ) -> Session:
        merged = {**self.options, **(options or {})}
        return Session(sequence_id, dtype=self.dtype, options=merged, policy=self.retry)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ClientError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


class StreamingClient:
    """Keyword arguments are the fields of ClientSettings. Streams may run in several threads."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        self.settings = ClientSettings(url, **settings)
        kind = GrpcTransport if self.settings.protocol == "grpc" else HttpTransport
        self._transport: _Transport = kind(self.settings.endpoint)

    def stream(
        self,
        sequence_id: SequenceId | None = None,
        *,
        options: Mapping[str, OptionValue] | None = None,
    ) -> Stream:
        """A stream that opens with its first chunk; `options` add to the client's."""
        session = self.settings.session(sequence_id, options)
        return Stream(session, self._transport, self.settings.timeout_s)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> StreamingClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Stream:
    """Made by `StreamingClient.stream`; a context manager."""

    def __init__(self, session: Session, transport: _Transport, timeout_s: float) -> None:
        self._session = session
        self._transport = transport
        self._timeout_s = timeout_s

    @property
    def sequence_id(self) -> SequenceId:
        return self._session.sequence_id

    def send(self, samples: npt.ArrayLike) -> StreamUpdate:
        """Mono 16 kHz samples (or the rate named in the options), any number of them."""
        return self._drive(self._session.exchange(samples, is_last=False))

    def finish(self, samples: npt.ArrayLike | None = None) -> StreamUpdate:
        """Sends the last samples, if any, and returns the final text; the stream is then over."""
        return self._drive(self._session.exchange(samples, is_last=True))

    def abandon(self) -> None:
        """Frees the stream on the server, if it holds one, and forgets the text."""
        request = self._session.abandon_request()
        if request is not None:
            with contextlib.suppress(ClientError):
                self._transport.infer(request, min(ABANDON_TIMEOUT_S, self._timeout_s))

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.abandon()

    def _drive(self, exchange: Exchange) -> StreamUpdate:
        with contextlib.closing(exchange):
            step = advance(exchange)
            while not isinstance(step, StreamUpdate):
                step = advance(exchange, self._perform(step))
        return step

    def _perform(self, step: ChunkRequest | Pause) -> Reply | ClientError | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return self._transport.infer(step, self._timeout_s)
        except ClientError as error:
            return error


class AsyncStreamingClient:
    """StreamingClient for asyncio; make it inside the running event loop."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        self.settings = ClientSettings(url, **settings)
        kind = AsyncGrpcTransport if self.settings.protocol == "grpc" else AsyncHttpTransport
        self._transport: _AsyncTransport = kind(self.settings.endpoint)

    def stream(
        self,
        sequence_id: SequenceId | None = None,
        *,
        options: Mapping[str, OptionValue] | None = None,
    ) -> AsyncStream:
        """A stream that opens with its first chunk; `options` add to the client's."""
        session = self.settings.session(sequence_id, options)
        return AsyncStream(session, self._transport, self.settings.timeout_s)

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> AsyncStreamingClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


class AsyncStream:
    """Made by `AsyncStreamingClient.stream`; an asynchronous context manager."""

    def __init__(self, session: Session, transport: _AsyncTransport, timeout_s: float) -> None:
        self._session = session
        self._transport = transport
        self._timeout_s = timeout_s

    @property
    def sequence_id(self) -> SequenceId:
        return self._session.sequence_id

    async def send(self, samples: npt.ArrayLike) -> StreamUpdate:
        """Mono 16 kHz samples (or the rate named in the options), any number of them."""
        return await self._drive(self._session.exchange(samples, is_last=False))

    async def finish(self, samples: npt.ArrayLike | None = None) -> StreamUpdate:
        """Sends the last samples, if any, and returns the final text; the stream is then over."""
        return await self._drive(self._session.exchange(samples, is_last=True))

    async def abandon(self) -> None:
        """Frees the stream on the server, if it holds one, and forgets the text."""
        request = self._session.abandon_request()
        if request is not None:
            with contextlib.suppress(ClientError):
                await self._transport.infer(request, min(ABANDON_TIMEOUT_S, self._timeout_s))

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.abandon()

    async def _drive(self, exchange: Exchange) -> StreamUpdate:
        with contextlib.closing(exchange):
            step = advance(exchange)
            while not isinstance(step, StreamUpdate):
                step = advance(exchange, await self._perform(step))
        return step

    async def _perform(self, step: ChunkRequest | Pause) -> Reply | ClientError | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return await self._transport.infer(step, self._timeout_s)
        except ClientError as error:
            return error
