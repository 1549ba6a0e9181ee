"""The errors between a client and the server, sorted by what the caller should do about each.

ClientError                  base; the message ends with the remedy
├── ServerUnavailableError   no server answers there, or it is going down: start it, retry
├── OverloadedError          the server is up but has no room for a stream: retry later
├── StreamLostError          the server no longer knows the stream: START it again
│   └── StreamEndedError     the server ended it at its longest length: go on in a new one
├── RequestRejectedError     this request is wrong: mend it; the stream goes on
├── DeadlineError            no answer in time: the chunk's fate is unknown
├── StreamStateError         a call that the stream's state forbids (a programming error)
└── InvalidAudioError        the samples or the file cannot be sent
"""

from __future__ import annotations

import asyncio
import re

from tritonclient.utils import InferenceServerException

_LOST = re.compile(r"must specify the START flag|unknown stream|send START", re.I)
_ENDED = re.compile(r"finish_reason", re.I)
# gRPC reports both a dead peer and a refusing server as UNAVAILABLE: only the words differ.
_NO_PEER = re.compile(
    r"failed to connect|errors resolving|name resolution|connection (refused|reset|timed out)"
    r"|socket closed|broken pipe|goaway|ping timeout|keepalive|recvmsg|end of tcp stream"
    r"|stream removed|server is stopping|not ready|no available versions",
    re.I,
)
_INVALID = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "UNIMPLEMENTED", "UNSUPPORTED"}
_HTTP_STATUS = {
    "400": "INVALID_ARGUMENT",
    "404": "NOT_FOUND",
    "409": "ALREADY_EXISTS",
    "413": "INVALID_ARGUMENT",
    "499": "CANCELLED",
    "501": "UNIMPLEMENTED",
    "503": "UNAVAILABLE",
    "504": "DEADLINE_EXCEEDED",
}


class ClientError(Exception):
    """The base of the tree."""


class ServerUnavailableError(ClientError):
    pass


class OverloadedError(ClientError):
    pass


class StreamLostError(ClientError):
    pass


class StreamEndedError(StreamLostError):
    pass


class RequestRejectedError(ClientError):
    pass


class DeadlineError(ClientError):
    pass


class StreamStateError(ClientError):
    pass


class InvalidAudioError(ClientError, ValueError):
    pass


def translate(error: Exception, *, url: str, timeout_s: float) -> ClientError:
    """Maps what tritonclient, gRPC, gevent and aiohttp raise onto the tree."""
    if isinstance(error, ClientError):
        return error
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return _deadline(url, timeout_s)
    if isinstance(error, InferenceServerException):
        return _from_status(error, url=url, timeout_s=timeout_s)
    return _no_server(url, f"{type(error).__name__}: {error}")


def _from_status(error: InferenceServerException, *, url: str, timeout_s: float) -> ClientError:
    # An error of tritonclient's own checks has no status, since it sent no request.
    raw = str(error.status() or "INVALID_ARGUMENT").rsplit(".", 1)[-1]
    status = _HTTP_STATUS.get(raw, raw)
    text = str(error.message() or "no message")
    if status == "DEADLINE_EXCEEDED":
        return _deadline(url, timeout_s)
    if status == "UNAVAILABLE":
        return _no_server(url, text) if _NO_PEER.search(text) else _overloaded(url, text)
    if status in _INVALID:
        return _invalid(text)
    return StreamLostError(
        f"the server closed the stream with {status}: {text}; open a new stream, "
        "and look at the server's log if this repeats"
    )


def _invalid(text: str) -> ClientError:
    if _ENDED.search(text):
        return StreamEndedError(
            f"the stream is over on the server: {text}; go on in a new stream, "
            "or allow restarts with RetryPolicy"
        )
    if _LOST.search(text):
        return StreamLostError(
            f"the server does not know this stream (it was idle too long, or the server was "
            f"restarted): {text}; start a new stream, or allow restarts with RetryPolicy"
        )
    return RequestRejectedError(
        f"the server rejects the request: {text}; correct the audio, the options or the model name"
    )


def _overloaded(url: str, text: str) -> ClientError:
    return OverloadedError(
        f"{url} has no room for another stream: {text}; try again later, "
        "or allow attempts with RetryPolicy(start_attempts=...)"
    )


def _no_server(url: str, text: str) -> ClientError:
    return ServerUnavailableError(
        f"no server answers at {url} ({text}); check the address, the port and the protocol "
        "(gRPC 8001, HTTP 8000 by default), and that the server is ready"
    )


def _deadline(url: str, timeout_s: float) -> ClientError:
    return DeadlineError(
        f"{url} gave no answer within {timeout_s:g} s; the stream is given up: "
        "raise timeout_s, send shorter chunks, or look at the server's load"
    )
