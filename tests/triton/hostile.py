"""Requests that no client library sends, byte by byte."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Mapping
from typing import Any

from oasr_backend.serve.process import TritonServer

INFER = "/v2/models/oasr_streaming/infer"
#: curl -d and urllib name this type when the caller names none.
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
#: The body of this request may still go on for ever.
HALF_REQUEST = f"POST {INFER} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
_TIMEOUT_S = 300.0


def utterance(stream_id: int, num_samples: int = 16_000) -> bytes:
    """A whole stream of silence as one JSON request, 5 bytes a sample."""
    values = [0.0] * num_samples
    tensor = {"name": "WAV", "datatype": "FP32", "shape": [1, num_samples], "data": values}
    ends = {"sequence_start": True, "sequence_end": True}
    return json.dumps(
        {"inputs": [tensor], "parameters": {"sequence_id": stream_id, **ends}}
    ).encode()


def nested(depth: int) -> bytes:
    """A JSON document of so many lists, each in the one before."""
    return b'{"inputs":' + b"[" * depth + b"]" * depth + b"}"


def one_byte_chunks(count: int) -> Iterable[bytes]:
    """A body of blanks that the connection sends byte by byte, already in chunked coding."""
    most = 100_000
    for begin in range(0, count, most):
        yield b"1\r\n \r\n" * min(most, count - begin)
    yield b"0\r\n\r\n"


def post(
    server: TritonServer, body: bytes, headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """The status and body of the answer. Raises OSError where none comes."""
    return _answer(_begin(server, {**(headers or {}), "Content-Length": str(len(body))}), [body])


def post_coded(server: TritonServer, pieces: Iterable[bytes]) -> tuple[int, str]:
    """As `post`, with a body that is in chunked coding."""
    return _answer(_begin(server, {"Transfer-Encoding": "chunked"}), pieces)


def _begin(server: TritonServer, headers: Mapping[str, str]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(server.http_url, timeout=_TIMEOUT_S)
    connection.putrequest("POST", INFER)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection


def _answer(connection: http.client.HTTPConnection, pieces: Iterable[bytes]) -> tuple[int, str]:
    try:
        for piece in pieces:
            connection.send(piece)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def outputs_of(page: str) -> dict[str, Any]:
    """Each output's first value."""
    return {output["name"]: output["data"][0] for output in json.loads(page)["outputs"]}
