"""Strings on the wire: whole in every script, and no output that was not asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tritonclient.grpc

from tests.guards import GUARD_S
from tests.triton.texts import TEXTS
from tests.triton.variants import LoadedModel, Variant, VariantServer
from tests.triton.wire import NOTHING, audio, sequence

STRINGS_MODEL = Path(__file__).parent / "strings_model.py"


VARIANT = Variant("strings", model_py=STRINGS_MODEL)


def wire_bytes(model: LoadedModel, outputs: Sequence[str], *, index: int, later: bool) -> bytes:
    """The bytes of the last of the outputs asked for."""
    with tritonclient.grpc.InferenceServerClient(model.server.grpc_url) as client:
        found = client.infer(
            model.name,
            audio(tritonclient.grpc, NOTHING),
            outputs=[tritonclient.grpc.InferRequestedOutput(name) for name in outputs],
            parameters={"index": index, "later": later},
            client_timeout=GUARD_S,
            **sequence(1 + index, "SE"),
        )
    assert [output.name for output in found.get_response().outputs] == list(outputs)
    return bytes(found.get_response().raw_output_contents[-1])


@pytest.mark.parametrize("later", [False, True])
def test_strings_arrive_whole(variant_server: VariantServer, later: bool) -> None:
    with variant_server.loaded(VARIANT) as model:
        found = [
            wire_bytes(model, ["TRANSCRIPTS"], index=index, later=later)
            for index in range(len(TEXTS))
        ]
    texts = [text.encode() for text in TEXTS]
    assert found == [len(text).to_bytes(4, "little") + text for text in texts]


@pytest.mark.parametrize("outputs", [["TRANSCRIPTS", "RESULT"], ["RESULT"]])
def test_a_response_holds_only_what_was_asked_for(
    variant_server: VariantServer, outputs: list[str]
) -> None:
    with variant_server.loaded(VARIANT) as model:
        laid_out = wire_bytes(model, outputs, index=1, later=True)
    assert json.loads(laid_out[4:])["outputs"] == outputs
