"""Answers with texts of its own, through the shipped functions."""

from __future__ import annotations

import json
import threading
from typing import Any

from oasr_backend.options import StreamOptions
from oasr_backend.triton_backend.io import answer_now, read_chunk, write_response
from oasr_backend.types import ChunkResult
from tests.triton.texts import TEXTS


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [_answer(request) for request in requests]


def _answer(request: Any) -> Any:
    chunk, asked = read_chunk(request, StreamOptions()), json.loads(request.parameters())
    result = ChunkResult(text=TEXTS[int(asked["index"])])
    if chunk.wants_result:
        result = result._replace(document={"outputs": _outputs(result, chunk.wants_text)})
    if not asked["later"]:
        return write_response(result, wants_text=chunk.wants_text)
    sender = request.get_response_sender()
    threading.Thread(
        target=answer_now, args=(sender, result), kwargs={"wants_text": chunk.wants_text}
    ).start()
    return None


def _outputs(result: ChunkResult, wants_text: bool) -> list[str]:
    response = write_response(result._replace(document={}), wants_text=wants_text)
    return [tensor.name() for tensor in response.output_tensors()]
