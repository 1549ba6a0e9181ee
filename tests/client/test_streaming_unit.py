"""The client's parts that need no server: the wire's types, errors, settings, options."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hypothesis import given
from hypothesis import strategies as st
from oasr_client.errors import (
    ClientError,
    DeadlineError,
    InvalidAudioError,
    OverloadedError,
    RequestRejectedError,
    ServerUnavailableError,
    StreamEndedError,
    StreamLostError,
    translate,
)
from oasr_client.options import parse_options
from oasr_client.settings import ClientSettings
from oasr_client.transcribe import Pace
from oasr_client.wire import ChunkRequest, infer_arguments, to_wire
from tritonclient.utils import InferenceServerException


def test_the_type_decides_the_scale_and_never_the_amplitude() -> None:
    quiet = np.array([0, 1, -1, 3], np.int16)
    np.testing.assert_array_equal(to_wire(quiet, "pcm16"), quiet)
    np.testing.assert_array_equal(to_wire(quiet, "fp32"), quiet.astype(np.float32) / 32768)
    loud = np.array([2.0, -2.0, 1.0, -1.0])
    np.testing.assert_array_equal(to_wire(loud, "pcm16"), [32767, -32768, 32767, -32768])
    np.testing.assert_array_equal(to_wire(loud, "fp32"), loud.astype(np.float32))


@given(st.lists(st.integers(-32768, 32767), max_size=50))
def test_pcm16_survives_the_way_through_floats(values: list[int]) -> None:
    samples = np.array(values, np.int16)
    np.testing.assert_array_equal(to_wire(to_wire(samples, "fp32"), "pcm16"), samples)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (np.zeros((2, 5)), "one dimension"),
        (np.zeros(5, np.int32), "expected floats"),
        (np.array([0.0, np.nan]), "NaN"),
        (np.array([0.0, np.inf]), "NaN"),
    ],
)
def test_samples_that_cannot_be_meant_are_refused(samples: Any, words: str) -> None:
    with pytest.raises(InvalidAudioError, match=words):
        to_wire(samples, "pcm16")


@pytest.mark.parametrize("tensors", [tritonclient.grpc, tritonclient.http])
@pytest.mark.parametrize(("dtype", "name"), [("pcm16", "PCM16"), ("fp32", "WAV")])
@pytest.mark.parametrize("num_samples", [0, 5])
def test_a_request_has_one_audio_tensor_of_one_row(
    tensors: Any, dtype: str, name: str, num_samples: int
) -> None:
    request = ChunkRequest(3, to_wire(np.zeros(num_samples), dtype), True, False, {"nbest": 2})
    arguments = infer_arguments(request, tensors=tensors, dtype=dtype)
    (audio,) = arguments["inputs"]
    assert (audio.name(), list(audio.shape())) == (name, [1, num_samples])
    assert [output.name() for output in arguments["outputs"]] == ["TRANSCRIPTS", "RESULT"]
    assert (arguments["sequence_start"], arguments["sequence_end"]) == (True, False)
    assert arguments["parameters"] == {"nbest": 2}


GRPC = "StatusCode."
LOST = "inference request for sequence 7 to model 'm' must specify the START flag on the first"


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (GRPC + "INVALID_ARGUMENT", LOST, StreamLostError),
        ("400", LOST, StreamLostError),
        ("400", "unknown stream 7: send START first", StreamLostError),
        ("400", "stream 7 is unknown here; send START on the first request", StreamLostError),
        ("400", "ended (finish_reason 'length'); send START", StreamEndedError),
        (GRPC + "INVALID_ARGUMENT", "unknown parameter 'nbset'", RequestRejectedError),
        ("400", "WAV holds NaN", RequestRejectedError),
        (GRPC + "NOT_FOUND", "unknown model", RequestRejectedError),
        (None, "Parameter is reserved", RequestRejectedError),
        (GRPC + "UNAVAILABLE", "all 64 streams are in use", OverloadedError),
        ("503", "all 64 streams are in use", OverloadedError),
        (GRPC + "UNAVAILABLE", "failed to connect to all addresses", ServerUnavailableError),
        (GRPC + "UNAVAILABLE", "Socket closed", ServerUnavailableError),
        (GRPC + "UNAVAILABLE", "Server is stopping, scheduler for", ServerUnavailableError),
        (GRPC + "DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineError),
        (GRPC + "INTERNAL", "the step failed", StreamLostError),
        ("500", "the step failed", StreamLostError),
    ],
)
def test_each_status_is_told_by_what_to_do(status: str | None, message: str, kind: type) -> None:
    error = translate(InferenceServerException(message, status), url="host:1", timeout_s=2.0)
    assert type(error) is kind
    if kind is not DeadlineError:
        assert message in str(error)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (TimeoutError(), DeadlineError),
        (asyncio.TimeoutError(), DeadlineError),
        (ConnectionRefusedError(111, "refused"), ServerUnavailableError),
        (RequestRejectedError("as it is"), RequestRejectedError),
    ],
)
def test_what_the_network_raises_is_told_too(raised: Exception, kind: type) -> None:
    assert type(translate(raised, url="host:1", timeout_s=2.0)) is kind


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"protocol": "ws"}, "grpc, http"),
        ({"dtype": "int8"}, "pcm16, fp32"),
        ({"url": "http://host:8000"}, "host:port"),
        ({"timeout_s": 0.0}, "above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ClientError, match=words):
        ClientSettings(**settings)


def test_the_port_follows_the_protocol() -> None:
    assert ClientSettings().endpoint.url == "127.0.0.1:8001"
    assert ClientSettings(protocol="http").endpoint.url == "127.0.0.1:8000"


def test_options_are_typed_as_json_scalars() -> None:
    pairs = ["flag=true", "nbest=3", "boost=0.5", "rate=1e3", 'id="3"', "hotwords=a,b=c", "none="]
    assert parse_options(pairs) == {
        "flag": True,
        "nbest": 3,
        "boost": 0.5,
        "rate": 1000.0,
        "id": "3",
        "hotwords": "a,b=c",
        "none": "",
    }
    with pytest.raises(RequestRejectedError, match="key=value"):
        parse_options(["nbest"])


def test_realtime_waits_until_the_chunk_would_have_been_said() -> None:
    pace = Pace(chunk_ms=640, is_realtime=True)
    assert pace.wait_s(16000, elapsed_s=0.25) == 0.75
    assert pace.wait_s(16000, elapsed_s=2.0) == 0.0
    assert Pace().wait_s(16000, elapsed_s=0.0) == 0.0
