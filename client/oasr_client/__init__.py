"""A client for streaming speech recognition on Triton; independent of the server's code.

The public names load on first use: the command can then end quietly while it still imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oasr_client.audio import iter_audio, iter_chunks, read_audio, read_raw
    from oasr_client.errors import (
        ClientError,
        DeadlineError,
        InvalidAudioError,
        OverloadedError,
        RequestRejectedError,
        ServerUnavailableError,
        StreamEndedError,
        StreamLostError,
        StreamStateError,
    )
    from oasr_client.retry import RetryPolicy
    from oasr_client.session import StreamUpdate
    from oasr_client.settings import ClientSettings
    from oasr_client.streaming import (
        AsyncStream,
        AsyncStreamingClient,
        Stream,
        StreamingClient,
    )

__all__ = [
    "AsyncStream",
    "AsyncStreamingClient",
    "ClientError",
    "ClientSettings",
    "DeadlineError",
    "InvalidAudioError",
    "OverloadedError",
    "RequestRejectedError",
    "RetryPolicy",
    "ServerUnavailableError",
    "Stream",
    "StreamEndedError",
    "StreamLostError",
    "StreamStateError",
    "StreamUpdate",
    "StreamingClient",
    "iter_audio",
    "iter_chunks",
    "read_audio",
    "read_raw",
]

_HOME = {
    "AsyncStream": "streaming",
    "AsyncStreamingClient": "streaming",
    "ClientSettings": "settings",
    "RetryPolicy": "retry",
    "Stream": "streaming",
    "StreamUpdate": "session",
    "StreamingClient": "streaming",
    "iter_audio": "audio",
    "iter_chunks": "audio",
    "read_audio": "audio",
    "read_raw": "audio",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
