"""Single requests: the shortest utterances, both kinds of ids, and bad ones beside good ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.conftest import LiveServer
from tests.triton.conftest import Pcm16
from tests.triton.wire import NOTHING, AsyncWire, Wire, audio, run_async, status_of, tensor

WINDOW_SAMPLES = 10960


@pytest.fixture(name="wire", params=["grpc", "http"])
def _wire(live_server: LiveServer, request: pytest.FixtureRequest) -> Any:
    with Wire(live_server.server, live_server.model_name, request.param) as wire:
        yield wire


@pytest.mark.parametrize(
    "num_samples", [0, 1, 399, 400, WINDOW_SAMPLES - 1, WINDOW_SAMPLES, WINDOW_SAMPLES + 1]
)
def test_an_utterance_of_any_length_has_a_final_text(
    wire: Wire, recordings: list[Pcm16], num_samples: int
) -> None:
    samples = recordings[0][:num_samples]
    whole = wire.send(1000 + num_samples, samples, "SE")
    assert whole == wire.stream(2000 + num_samples, [samples, samples[:0]])
    assert whole == wire.stream(3000 + num_samples, [samples[:0], samples])
    if num_samples < 400:
        assert whole == ""


def test_an_end_without_samples_gives_the_final_text(
    wire: Wire, recordings: list[Pcm16], expected: list[str]
) -> None:
    for last in (recordings[0][:0], NOTHING):
        assert wire.stream("empty-end", [recordings[0], last]) == expected[0]
    wire.send("dummy", recordings[0], "S")
    assert wire.send("dummy", np.ones(1, np.int16), "E", valid=0) == expected[0]


def test_integers_and_strings_name_different_streams(
    wire: Wire, recordings: list[Pcm16], expected: list[str]
) -> None:
    ids: list[int | str] = [42, "42", "a1b2c3d4-0000-4000-8000-000000000042", 2**63 - 1, "ключ"]
    for index, stream_id in enumerate(ids):
        wire.send(stream_id, recordings[index], "S")
    for index, stream_id in enumerate(ids):
        assert wire.send(stream_id, recordings[index][:0], "E") == expected[index]


def test_an_id_is_used_again_right_after_its_end(
    wire: Wire, recordings: list[Pcm16], expected: list[str]
) -> None:
    for index in range(4):
        half = len(recordings[index]) // 2
        pieces = [recordings[index][:half], recordings[index][half:]]
        assert wire.stream(10086, pieces) == expected[index]


@pytest.mark.parametrize("stream_id", [0, ""])
def test_an_id_that_names_nothing_is_refused(
    live_server: LiveServer, recordings: list[Pcm16], stream_id: int | str
) -> None:
    with (
        Wire(live_server.server, live_server.model_name) as wire,
        pytest.raises(InferenceServerException, match="non-zero or non-empty correlation ID"),
    ):
        wire.send(stream_id, recordings[0], "SE")


def test_the_document_tells_what_was_heard(
    wire: Wire, recordings: list[Pcm16], expected: list[str]
) -> None:
    pcm = recordings[0]
    partial = wire.document("document", pcm[:20000], "S")
    final = wire.document("document", pcm[20000:], "E")
    assert (partial["is_final"], partial["finish_reason"]) == (False, None)
    assert (final["is_final"], final["finish_reason"]) == (True, "end")
    assert final["text"] == expected[0]
    assert partial["audio_s"] == pytest.approx(20000 / 16000)
    assert final["audio_s"] == pytest.approx(len(pcm) / 16000, abs=1e-3)


GRPC = tritonclient.grpc
ONES = np.ones(100, np.float32)
NOT_A_NUMBER = np.array([0.0, np.nan, 0.0], np.float32)
INFINITE = np.array([np.inf], np.float32)

#: name -> (tensors, flags, parameters, the words of the answer)
BAD: dict[str, tuple[Callable[[], list[Any]], str, dict[str, Any], list[str]]] = {
    "nan": (lambda: audio(GRPC, NOT_A_NUMBER), "S", {}, ["sample 1 is nan", "finite"]),
    "inf at once": (lambda: audio(GRPC, INFINITE), "SE", {}, ["sample 0 is inf", "finite"]),
    "too many valid": (
        lambda: audio(GRPC, ONES, valid=101), "S", {}, ["WAV_LENS=[101]", "100 samples", "0 to 100"]
    ),
    "fewer than none": (
        lambda: audio(GRPC, ONES, valid=-1), "S", {}, ["WAV_LENS=[-1]", "0 to 100"]
    ),
    "both inputs": (
        lambda: [*audio(GRPC, ONES), tensor(GRPC, "PCM16", np.ones(9, np.int16))],
        "S", {}, ["both of WAV and PCM16", "exactly one"],
    ),
    "no audio input": (
        lambda: [tensor(GRPC, "WAV_LENS", np.zeros(1, np.int32))],
        "S", {}, ["neither of WAV and PCM16", "exactly one"],
    ),
    "unknown parameter": (
        lambda: audio(GRPC, ONES), "S", {"smaple_rate": 8000},
        ["'smaple_rate'=8000", "did you mean 'sample_rate'"],
    ),
    "ill-typed parameter": (
        lambda: audio(GRPC, ONES), "S", {"sample_rate": "8000"},
        ["sample_rate='8000'", "of type str", "send it as int"],
    ),
    "impossible rate": (
        lambda: audio(GRPC, ONES), "S", {"sample_rate": 192000}, ["192000", "8000 .. 48000"]
    ),
    "stereo": (lambda: audio(GRPC, ONES), "S", {"channels": 2}, ["channels=2", "mono"]),
    "unknown encoding": (
        lambda: audio(GRPC, ONES), "S", {"encoding": "opus"}, ["'opus'", "pcm, mulaw, alaw"]
    ),
    "a file": (
        lambda: audio(GRPC, np.frombuffer(b"RIFF\x10\x00\x00\x00WAVE", np.int16)),
        "S", {}, ["RIFF header", "strip"],
    ),
    "unknown id": (lambda: audio(GRPC, ONES), "", {}, ["START"]),
    "end of nobody": (lambda: audio(GRPC, ONES), "E", {}, ["START"]),
    "wrong type": (
        lambda: [tensor(GRPC, "WAV", np.ones(9, np.int32), "INT32")], "S", {}, ["FP32"]
    ),
    "unknown input": (
        lambda: [*audio(GRPC, ONES), tensor(GRPC, "SPEECH", ONES)], "S", {}, ["SPEECH"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone_and_says_why(
    live_server: LiveServer, recordings: list[Pcm16], expected: list[str], name: str
) -> None:
    tensors, flags, parameters, words = BAD[name]

    async def act(wire: AsyncWire) -> tuple[InferenceServerException, list[str]]:
        async def bad() -> InferenceServerException:
            with pytest.raises(InferenceServerException) as caught:
                await wire.send_tensors(f"bad {name}", tensors(), flags, parameters=parameters)
            return caught.value

        halves = [np.array_split(pcm, 2) for pcm in recordings[:3]]
        good = [wire.stream(f"good {name} {i}", pieces) for i, pieces in enumerate(halves)]
        error, *texts = await asyncio.gather(bad(), *good)
        return error, texts

    error, texts = run_async(live_server.server, live_server.model_name, act)
    assert status_of(error) == "INVALID_ARGUMENT"
    for word in words:
        assert word in str(error.message())
    assert texts == expected[:3]


def test_all_bad_requests_at_once_leave_open_streams_exact(
    live_server: LiveServer, recordings: list[Pcm16], expected: list[str]
) -> None:
    async def act(wire: AsyncWire) -> list[str]:
        await asyncio.gather(*(wire.send(f"open {i}", recordings[i], "S") for i in range(4)))
        poison = [
            wire.send_tensors(f"open {i}", tensors(), "", parameters=parameters)
            for i, name in enumerate(["nan", "too many valid", "both inputs", "stereo"])
            for tensors, _, parameters, _ in [BAD[name]]
        ]
        outcomes = await asyncio.gather(*poison, return_exceptions=True)
        assert all(isinstance(outcome, InferenceServerException) for outcome in outcomes)
        return await asyncio.gather(*(wire.send(f"open {i}", NOTHING, "E") for i in range(4)))

    texts = run_async(live_server.server, live_server.model_name, act)
    assert texts == expected[:4]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_chunk_numbers_make_a_lost_or_repeated_chunk_an_error(
    live_server: LiveServer, recordings: list[Pcm16], expected: list[str], protocol: str
) -> None:
    first, second, third = np.array_split(recordings[0], 3)
    with Wire(live_server.server, live_server.model_name, protocol) as wire:
        wire.send("numbered", first, "S", parameters={"chunk_seq": 0})
        for number in (0, 2):
            with pytest.raises(InferenceServerException, match=f"chunk_seq={number}, expected 1"):
                wire.send("numbered", second, parameters={"chunk_seq": number})
        wire.send("numbered", second, parameters={"chunk_seq": 1})
        text = wire.send("numbered", third, "E", parameters={"chunk_seq": 2})
    assert text == expected[0]
