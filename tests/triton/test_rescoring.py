"""Attention rescoring on a live server, beside a stream that does not ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from oasr_backend.config import ServingConfig
from oasr_backend.engine import Engine
from oasr_backend.types import AudioChunk
from tests.decoder_checkpoint import write_checkpoint
from tests.result_schema import check_document
from tests.triton.conftest import Pcm16
from tests.triton.variants import LoadedModel, Variant, VariantServer
from tests.triton.wire import AsyncWire, run_async

BEAM: dict[str, Any] = {"decoder": "prefix_beam"}
RESCORED: dict[str, Any] = {**BEAM, "rescoring": True}
PIECE = 8000


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Variant]:
    """In process, and the same as a model of the server."""
    directory = write_checkpoint(tmp_path_factory.mktemp("rescoring") / "checkpoint")
    engine = Engine.load(directory, ServingConfig(), device="cpu")
    return engine, Variant("rescoring", checkpoint_dir=directory)


@pytest.fixture(scope="module", name="model")
def _model(engine: tuple[Engine, Variant], variant_server: VariantServer) -> Iterator[LoadedModel]:
    with variant_server.loaded(engine[1]) as model:
        yield model


def local_text(engine: Engine, samples: Pcm16, parameters: dict[str, Any]) -> str:
    samples_S = samples.astype(np.float32) / np.float32(32768)
    (result,) = engine.process(
        [AudioChunk("a", samples_S, is_first=True, is_last=True, parameters=parameters)]
    )
    assert result.error is None
    return result.text


async def speak(wire: AsyncWire, stream_id: str, samples: Pcm16, parameters: dict[str, Any]) -> str:
    for start in range(0, samples.size, PIECE):
        flags = ("S" if start == 0 else "") + ("E" if start + PIECE >= samples.size else "")
        text = await wire.send(
            stream_id, samples[start : start + PIECE], flags,
            parameters=parameters if start == 0 else None,
        )  # fmt: skip
    return text


def test_one_of_two_streams_at_once_is_rescored(
    engine: tuple[Engine, Variant], model: LoadedModel, recordings: list[Pcm16]
) -> None:
    async def act(wire: AsyncWire) -> list[str]:
        return await asyncio.gather(
            speak(wire, "rescored", recordings[1], RESCORED),
            speak(wire, "plain", recordings[1], BEAM),
        )

    rescored, plain = run_async(model.server, model.name, act)
    assert rescored == local_text(engine[0], recordings[1], RESCORED)
    assert plain == local_text(engine[0], recordings[1], BEAM)
    assert rescored != plain, "another seed of the random decoder: this one changes nothing"


def test_the_document_says_whether_the_text_is_rescored(
    model: LoadedModel, recordings: list[Pcm16]
) -> None:
    half = recordings[0].size // 2
    with model.wire("http") as wire:
        first = wire.document("a", recordings[0][:half], "S", parameters={**RESCORED, "nbest": 3})
        last = wire.document("a", recordings[0][half:], "E")
    assert check_document(first)["rescored"] is False
    assert check_document(last)["rescored"] is True
    assert last["nbest"][0]["text"] == last["text"]
