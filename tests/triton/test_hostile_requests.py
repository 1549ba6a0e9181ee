"""Requests made to end the server: each gets an answer, and the next stream is served."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import zlib
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from oasr_backend.serve.process import TritonServer, local_settings
from oasr_backend.serve.stack import STACK_BYTES
from tests.conftest import MODEL_REPOSITORY
from tests.triton import hostile
from tests.triton.conftest import Pcm16
from tests.triton.processes import newest_stub
from tests.triton.variants import GOLDEN
from tests.triton.wire import Wire, sequence

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    """The module has its own server: the pages that these requests touch stay with its threads."""
    settings = local_settings(MODEL_REPOSITORY, overrides={"checkpoint_dir": str(GOLDEN)})
    with TritonServer(settings) as running:
        running.wait_ready(180)
        yield running


@pytest.fixture(autouse=True)
def _next_stream_is_served(server: TritonServer, recordings: list[Pcm16]) -> Iterator[None]:
    """The same process as before gives the same text as before."""
    with Wire(server, "oasr_streaming") as wire:
        before, stub = wire.send(1, recordings[0], "SE"), newest_stub(server)
    yield
    assert server.exit_status is None
    assert newest_stub(server) == stub
    with Wire(server, "oasr_streaming") as wire:
        assert wire.send(2, recordings[0], "SE") == before


def test_the_server_and_the_model_have_the_stack(server: TritonServer) -> None:
    for process_id in (server.pid, newest_stub(server)):
        assert resource.prlimit(process_id, resource.RLIMIT_STACK)[0] == STACK_BYTES


@pytest.mark.parametrize("num_samples", [1_000_000, 2_000_000])
def test_a_form_typed_body_is_served_whatever_its_size(
    server: TritonServer, num_samples: int
) -> None:
    body = hostile.utterance(7, num_samples)
    assert len(body) > 4 * MIB
    status, page = hostile.post(server, body, hostile.FORM)
    assert status == 200, page
    document = json.loads(hostile.outputs_of(page)["RESULT"])
    assert document["audio_s"] == num_samples / 16_000


def test_a_million_chunks_of_a_byte_get_an_answer(server: TritonServer) -> None:
    status, page = hostile.post_coded(server, hostile.one_byte_chunks(1_000_000))
    assert status == 500
    assert "The document is empty. at 1000000" in page


def test_a_million_nested_lists_get_an_answer(server: TritonServer) -> None:
    status, page = hostile.post(server, hostile.nested(1_000_000))
    assert status == 400
    assert "Input must set only one" in page


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_unpacks_to_64_mib_gets_an_answer(server: TritonServer, encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    status, page = hostile.post(server, pack(b" " * 64 * MIB), {"Content-Encoding": encoding})
    assert status == 500
    assert f"The document is empty. at {64 * MIB}" in page


@pytest.mark.parametrize(
    "size", ["-1", "1", "99999999999", "18446744073709551615", "9" * 400, "", "x"]
)
def test_a_length_of_the_inference_header_that_cannot_be_is_refused(
    server: TritonServer, size: str
) -> None:
    body = hostile.utterance(7, 100)
    status, page = hostile.post(server, body, {"Inference-Header-Content-Length": size})
    assert status in (400, 500)
    assert json.loads(page)["error"]


@pytest.mark.parametrize(
    "size", [-1, 0, 15, 17, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, 1e300, "16", None, []]
)
def test_a_size_of_binary_data_that_cannot_be_is_refused(
    server: TritonServer, size: object
) -> None:
    tensor = {"name": "WAV", "datatype": "FP32", "shape": [1, 4]}
    tensor |= {"parameters": {"binary_data_size": size}}
    ends = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    header = json.dumps({"inputs": [tensor], "parameters": ends}).encode()
    length = {"Inference-Header-Content-Length": str(len(header))}
    status, page = hostile.post(server, header + bytes(16), length)
    assert status in (400, 500)
    assert json.loads(page)["error"]


@pytest.mark.parametrize(
    ("port", "opening"),
    [
        ("http", b""),
        ("http", hostile.HALF_REQUEST),
        ("grpc", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ],
    ids=["idle", "half a request", "half a call"],
)
def test_a_thousand_connections_that_go_no_further_keep_nobody_out(
    server: TritonServer, recordings: list[Pcm16], port: str, opening: bytes
) -> None:
    host, _, number = (server.http_url if port == "http" else server.grpc_url).partition(":")
    with ExitStack() as held:
        for _ in range(1000):
            connection = held.enter_context(socket.create_connection((host, int(number))))
            connection.sendall(opening)
        for protocol in ("grpc", "http"):
            with Wire(server, "oasr_streaming", protocol) as wire:
                assert wire.send(f"beside them, {protocol}", recordings[0], "SE")


def test_a_hundred_thousand_header_lines_get_an_answer(server: TritonServer) -> None:
    host, _, port = server.http_url.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"GET /v2/health/live HTTP/1.1\r\n" + b"X-More: 1\r\n" * 100_000 + b"\r\n"
        )
        assert connection.recv(64).startswith(b"HTTP/1.1 200 OK")


def test_a_grpc_message_of_64_mib_that_does_not_fit_its_shape_is_refused(
    server: TritonServer,
) -> None:
    audio = tritonclient.grpc.InferInput("WAV", [1, 1 << 24], "FP32")
    audio.set_data_from_numpy(np.zeros((1, 1 << 24), np.float32))
    audio.set_shape([1, (1 << 24) + 1])
    with (
        tritonclient.grpc.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="input byte size mismatch"),
    ):
        client.infer("oasr_streaming", [audio], **sequence(7, "SE"))


def test_a_body_in_pieces_that_never_ends_keeps_nobody_out(
    server: TritonServer, recordings: list[Pcm16]
) -> None:
    """Its thread serves other callers too: there are more such callers than threads."""
    host, _, port = server.http_url.partition(":")
    with ExitStack() as held:
        for _ in range(32):
            connection = held.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(hostile.HALF_REQUEST)
            connection.sendall(b"1\r\n \r\n" * 1000)
        with Wire(server, "oasr_streaming", "http") as wire:
            assert wire.send("beside them", recordings[0], "SE")
