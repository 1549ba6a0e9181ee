"""The options that a client may give at START, on a live server, over both protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from oasr_backend.config import ServingConfig
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk
from tests.conftest import DEMO_DIR, LiveServer
from tests.result_schema import check_document
from tests.same_results import assert_same_results
from tests.triton.conftest import Pcm16
from tests.triton.wire import audio, sequence

BEAM = {"decoder": "prefix_beam", "beam_size": 10}
EVERYTHING = {**BEAM, "nbest": 4, "word_times": True, "endpoint": True}


class Asker:
    """Sends one utterance with options; returns the RESULT document of each answer."""

    def __init__(self, server: LiveServer, protocol: str) -> None:
        self._module: Any = tritonclient.grpc if protocol == "grpc" else tritonclient.http
        url = server.grpc_url if protocol == "grpc" else server.http_url
        self.client = self._module.InferenceServerClient(url)
        self._model_name = server.model_name

    def ask(
        self, stream_id: str, samples: Pcm16, *, piece: int = 16000, **parameters: Any
    ) -> list[dict[str, Any]]:
        documents = []
        for start in range(0, samples.size, piece):
            flags = ("S" if start == 0 else "") + ("E" if start + piece >= samples.size else "")
            documents.append(
                self._send(stream_id, samples[start : start + piece], flags, parameters)
            )
        return documents

    def _send(
        self, stream_id: str, samples: Pcm16, flags: str, parameters: dict[str, Any]
    ) -> dict[str, Any]:
        result = self.client.infer(
            self._model_name,
            audio(self._module, samples),
            outputs=[self._module.InferRequestedOutput("RESULT")],
            parameters=parameters if "S" in flags else None,
            **sequence(stream_id, flags),
        )
        return check_document(json.loads(result.as_numpy("RESULT")[0]))


@pytest.fixture(name="asker", params=["grpc", "http"])
def _asker(live_server: LiveServer, request: pytest.FixtureRequest) -> Iterator[Asker]:
    asker = Asker(live_server, request.param)
    yield asker
    asker.client.close()


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    return load_engine(DEMO_DIR, ServingConfig(), device="cpu")


def in_process(engine: Engine, samples: Pcm16, **parameters: Any) -> dict[str, Any]:
    samples_S = samples.astype(np.float32) / np.float32(32768)
    chunk = AudioChunk(
        "a",
        samples_S,
        is_first=True,
        is_last=True,
        options=StreamOptions.from_parameters(parameters),
        wants_result=True,
    )
    (result,) = engine.process([chunk])
    return check_document(result.document)


def test_every_answer_holds_all_that_was_asked_for(asker: Asker, recordings: list[Pcm16]) -> None:
    documents = asker.ask("all", recordings[0], **EVERYTHING)
    assert [document["is_final"] for document in documents] == [
        *[False] * (len(documents) - 1),
        True,
    ]
    assert all({"tokens", "words", "nbest", "segments"} <= set(one) for one in documents)
    assert documents[-1]["words"]


def test_the_n_best_are_those_of_the_decoder_in_process(
    asker: Asker, engine: Engine, recordings: list[Pcm16]
) -> None:
    for index, samples in enumerate(recordings[:4]):
        served = asker.ask(f"nbest-{index}", samples, **EVERYTHING)[-1]
        assert_same_results(served, in_process(engine, samples, **EVERYTHING))


def test_two_seconds_of_silence_are_one_border_on_the_wire(
    asker: Asker, recordings: list[Pcm16]
) -> None:
    pause = np.zeros(32000, np.int16)
    samples = np.concatenate([recordings[0], pause, recordings[1]])
    plain = asker.ask("plain", samples)[-1]
    final = asker.ask("border", samples, piece=4000, endpoint=True)[-1]
    assert len(final["segments"]) == 2
    assert " ".join(segment["text"] for segment in final["segments"]) == plain["text"]


def test_hotwords_and_fractions_travel_as_both_protocols_can(
    asker: Asker, engine: Engine, recordings: list[Pcm16]
) -> None:
    options = {**BEAM, "hotwords": "PROTECTIVE|SECRET SERVICE", "hotword_boost": "1.25"}
    served = asker.ask("hot", recordings[2], **options)[-1]
    assert served["text"] == in_process(engine, recordings[2], **options)["text"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"n_best": 3}, ["'n_best'", "did you mean 'nbest'"]),
        ({"nbest": "3"}, ["nbest", "'3'", "int"]),
        ({**BEAM, "hotwords": "\u2603"}, ["'\u2603'", "cannot spell"]),
        ({"language": "xx"}, ["language='xx'", "'en'"]),
        ({**BEAM, "use_lm": True}, ["use_lm", "lm_path"]),
        ({"rescoring": True}, ["rescoring=True", "decoder=prefix_beam"]),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(
    asker: Asker, recordings: list[Pcm16], parameters: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        asker.ask("refused", recordings[0], **parameters)
    for word in words:
        assert word in str(caught.value)
