"""A client for streaming speech recognition on Triton; independent of the server's code."""

from oasr_client.audio import iter_chunks, read_audio, read_raw
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
from oasr_client.session import RetryPolicy, StreamUpdate
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
    "iter_chunks",
    "read_audio",
    "read_raw",
]
