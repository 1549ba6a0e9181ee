"""Attention rescoring by the shipped model, beside a stream that does not ask; and its refusal."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from oasr_backend.config import ServingConfig
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk
from tests.conftest import DEMO_DIR, LiveServer
from tests.result_schema import check_document
from tests.triton.conftest import Pcm16
from tests.triton.variants import GOLDEN, Variant, VariantServer
from tests.triton.wire import AsyncWire, Wire, run_async

BEAM: dict[str, Any] = {"decoder": "prefix_beam"}
RESCORED: dict[str, Any] = {**BEAM, "rescoring": True}
PIECE = 8000


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    return load_engine(DEMO_DIR, ServingConfig(), device="cpu")


@pytest.fixture(scope="module", name="disputed")
def _disputed(engine: Engine, recordings: list[Pcm16]) -> Pcm16:
    """The shortest recording of whose hypotheses the attention decoder chooses another."""
    return next(
        pcm
        for pcm in recordings
        if local_text(engine, pcm, RESCORED) != local_text(engine, pcm, BEAM)
    )


def local_text(engine: Engine, samples: Pcm16, parameters: dict[str, Any]) -> str:
    samples_S = samples.astype(np.float32) / np.float32(32768)
    (result,) = engine.process(
        [
            AudioChunk(
                "a", samples_S, is_first=True, is_last=True, options=StreamOptions(**parameters)
            )
        ]
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
    engine: Engine, live_server: LiveServer, disputed: Pcm16
) -> None:
    async def act(wire: AsyncWire) -> list[str]:
        return await asyncio.gather(
            speak(wire, "rescored", disputed, RESCORED), speak(wire, "plain", disputed, BEAM)
        )

    rescored, plain = run_async(live_server.server, live_server.model_name, act)
    assert rescored == local_text(engine, disputed, RESCORED)
    assert plain == local_text(engine, disputed, BEAM)
    assert rescored != plain


def test_the_document_says_whether_the_text_is_rescored(
    live_server: LiveServer, recordings: list[Pcm16]
) -> None:
    half = recordings[0].size // 2
    with Wire(live_server.server, live_server.model_name, "http") as wire:
        first = wire.document("a", recordings[0][:half], "S", parameters={**RESCORED, "nbest": 3})
        last = wire.document("a", recordings[0][half:], "E")
    assert check_document(first)["rescored"] is False
    assert check_document(last)["rescored"] is True
    assert last["nbest"][0]["text"] == last["text"]


def test_a_model_without_a_decoder_refuses_and_serves_everything_else(
    variant_server: VariantServer, recordings: list[Pcm16]
) -> None:
    variant = Variant("no_decoder", checkpoint_dir=GOLDEN)
    with variant_server.loaded(variant) as model, model.wire() as wire:
        with pytest.raises(InferenceServerException) as caught:
            wire.send("a", recordings[0], "SE", parameters=RESCORED)
        for words in ("rescoring:", "has no attention decoder", "leave rescoring out"):
            assert words in str(caught.value)
        assert wire.send("a", recordings[0], "SE", parameters=BEAM)
