"""A transport for asyncio that tells when it is used in two event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from oasr_client.errors import StreamStateError
from oasr_client.settings import AsyncTransport
from oasr_client.wire import ChunkRequest, Reply


class LoopBoundTransport:
    """Makes its transport in the running event loop, else in the one that first uses it.

    Raises StreamStateError in any other loop: the libraries below hang there, or blame the network.
    """

    def __init__(self, make: Callable[[], AsyncTransport]) -> None:
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: AsyncTransport | None = None
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        # It is made now where it can be, so that no request pays for the libraries' import.
        self._of_this_loop()

    async def infer(self, request: ChunkRequest, timeout_s: float) -> Reply:
        return await self._of_this_loop().infer(request, timeout_s)

    async def close(self) -> None:
        if self._transport is not None:
            await self._of_this_loop().close()

    def _of_this_loop(self) -> AsyncTransport:
        loop = asyncio.get_running_loop()
        if self._transport is None:
            self._loop, self._transport = loop, self._make()
        if self._loop is not loop:
            raise StreamStateError(
                "this AsyncStreamingClient belongs to another event loop; make one in each loop, "
                "and close it there"
            )
        return self._transport
