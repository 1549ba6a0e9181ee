"""WeNet's own prefix beams for two golden checkpoints, out of a live server that hears the audio.

The features of the goldens are those of two recordings, which travel here as audio in pieces.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import tritonclient.grpc as triton

from oasr_backend.config import ServingConfig
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.types import AudioChunk
from tests.conftest import DEMO_DIR
from tests.result_schema import check_document
from tests.same_results import assert_same_results
from tests.test_parity import Golden, goldens
from tests.triton.conftest import Pcm16
from tests.triton.variants import LoadedModel, Variant, VariantServer
from tests.triton.wire import audio, sequence

RECORDINGS = {"wenet_small": "LJ050-0008_am_liam", "wenet_bn_k31": "LJ050-0178_bf_emma"}
# Each chunk size and each kind of history once; tests/test_parity.py has all of both checkpoints.
SETTINGS = (
    "wenet_small-c16_l4",
    "wenet_small-c16_l-1",
    "wenet_bn_k31-c8_l4",
    "wenet_bn_k31-c4_l0",
)
BEAM = 10


@pytest.fixture(name="golden", params=SETTINGS, scope="module")
def _golden(request: pytest.FixtureRequest) -> Golden:
    return goldens()[request.param]


@pytest.fixture(name="settings", scope="module")
def _settings(golden: Golden) -> dict[str, str]:
    return {
        "chunk_size": str(golden.chunk_size),
        "num_left_chunks": str(golden.num_left_chunks),
        "decoder": "prefix_beam",
        "beam_size": str(BEAM),
        "tail_padding": "false",
    }


@pytest.fixture(name="model", scope="module")
def _model(
    variant_server: VariantServer, golden: Golden, settings: dict[str, str]
) -> Iterator[LoadedModel]:
    variant = Variant("golden", settings, checkpoint_dir=golden.directory)
    with variant_server.loaded(variant) as model:
        yield model


def read_recording(golden: Golden) -> Pcm16:
    path = DEMO_DIR / "eval" / f"{RECORDINGS[golden.directory.name]}.flac"
    pcm: Pcm16 = soundfile.read(path, dtype="int16")[0]
    return pcm


def ragged(pcm: Pcm16, seed: int) -> list[Pcm16]:
    """Pieces of any length from nothing to 1.2 s; the last one is what is left."""
    generator = np.random.default_rng(seed)
    edges = np.cumsum(generator.integers(0, 19_200, size=pcm.size))
    return np.split(pcm, edges[edges < pcm.size])


def serve(model: LoadedModel, pieces: list[Pcm16]) -> dict[str, Any]:
    """The RESULT document of the END."""
    with triton.InferenceServerClient(model.server.grpc_url) as client:
        for index, piece in enumerate(pieces):
            flags = ("S" if index == 0 else "") + ("E" if index == len(pieces) - 1 else "")
            reply = client.infer(
                model.name,
                audio(triton, piece),
                outputs=[triton.InferRequestedOutput("RESULT")],
                parameters={"nbest": BEAM} if index == 0 else None,
                **sequence("golden", flags),
            )
    return check_document(json.loads(reply.as_numpy("RESULT")[0]))


def decode_in_process(golden: Golden, settings: dict[str, str], pcm: Pcm16) -> dict[str, Any]:
    engine = load_engine(golden.directory, ServingConfig.from_parameters(settings), device="cpu")
    samples_S = pcm.astype(np.float32) / np.float32(32768)
    chunk = AudioChunk(
        "golden",
        samples_S,
        is_first=True,
        is_last=True,
        options=StreamOptions.from_parameters({"nbest": BEAM}, engine.config.defaults),
        wants_result=True,
    )
    (result,) = engine.process([chunk])
    return check_document(result.document)


def test_the_served_beam_is_wenets_and_its_n_best_are_the_decoders(
    model: LoadedModel, golden: Golden, settings: dict[str, str]
) -> None:
    pcm = read_recording(golden)
    served = serve(model, ragged(pcm, seed=golden.chunk_size))
    assert served["num_frames"] == len(golden.log_probs_TV)
    assert tuple(served["nbest"][0]["tokens"]) == golden.beam
    scores = [one["score"] for one in served["nbest"]]
    assert scores[0] == pytest.approx(golden.beam_score, abs=golden.score_tolerance)
    assert_same_results(served, decode_in_process(golden, settings, pcm))
    assert len(scores) == BEAM
    assert all(higher > lower for higher, lower in itertools.pairwise(scores))
