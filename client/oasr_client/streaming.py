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
from types import TracebackType
from typing import Any

import numpy.typing as npt

from oasr_client.errors import ClientError
from oasr_client.loop_bound import LoopBoundTransport
from oasr_client.session import Exchange, Pause, Session, StreamUpdate, advance
from oasr_client.settings import (
    AsyncTransport,
    ClientSettings,
    Transport,
    make_async_transport,
    make_transport,
)
from oasr_client.wire import ChunkRequest, OptionValue, Reply, SequenceId

ABANDON_TIMEOUT_S = 2.0


class StreamingClient:
    """Keyword arguments are the fields of ClientSettings. Streams may run in several threads."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        self.settings = ClientSettings(url, **settings)
        self._transport = make_transport(self.settings)

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

    def __init__(self, session: Session, transport: Transport, timeout_s: float) -> None:
        self._session = session
        self._transport = transport
        self._timeout_s = timeout_s

    @property
    def sequence_id(self) -> SequenceId:
        return self._session.sequence_id

    def send(self, samples: npt.ArrayLike) -> StreamUpdate:
        """Sends any number of mono samples at 16 kHz, or at the rate in the options."""
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
    """StreamingClient for asyncio; it belongs to the event loop it is made or first used in."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        self.settings = ClientSettings(url, **settings)
        self._transport = LoopBoundTransport(lambda: make_async_transport(self.settings))

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

    def __init__(self, session: Session, transport: AsyncTransport, timeout_s: float) -> None:
        self._session = session
        self._transport = transport
        self._timeout_s = timeout_s

    @property
    def sequence_id(self) -> SequenceId:
        return self._session.sequence_id

    async def send(self, samples: npt.ArrayLike) -> StreamUpdate:
        """Sends any number of mono samples at 16 kHz, or at the rate in the options."""
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
