"""Triton requests to audio chunks, results to Triton responses. No other module sees Triton.

The shapes and rules of the wire are those of config.pbtxt; a test holds the two together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from oasr_backend.errors import InvalidRequestError, OasrError, StepFailedError, shown
from oasr_backend.metrics import Reading
from oasr_backend.options import NOTHING_ASKED, ParameterValue, StreamOptions, read_parameters
from oasr_backend.types import (
    AudioChunk,
    ChunkResult,
    Pcm16,
    Samples,
    StreamId,
    never,
)

logger = logging.getLogger(__name__)

#: Requests of Triton's model warm-up carry no sequence; nothing is kept for them.
WARMUP_IDS: frozenset[StreamId] = frozenset((0, ""))
_START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
_END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
_NO_SAMPLES: Samples = np.empty(0, dtype=np.float32)


def is_warmup(chunk: AudioChunk) -> bool:
    return chunk.stream_id in WARMUP_IDS


def read_chunk(request: Any, defaults: StreamOptions, *, asks_cancelled: bool = True) -> AudioChunk:
    """What one request says, with the fault that is to be its answer if it cannot be read.

    `defaults` are the options of a stream that asks for nothing.
    """
    flags, requested = request.flags(), request.requested_output_names()
    samples_S: Samples | Pcm16 = _NO_SAMPLES
    asked, fault = NOTHING_ASKED, None
    is_first = flags & _START != 0
    try:
        asked = read_parameters(_parameters(request), is_first=is_first, defaults=defaults)
        samples_S = _samples(request)
    except Exception as error:
        fault = _fault(error)
    return AudioChunk(
        stream_id=_stream_id(request),
        samples_S=samples_S,
        is_first=is_first,
        is_last=flags & _END != 0,
        options=asked.options,
        chunk_seq=asked.chunk_seq,
        wants_text="TRANSCRIPTS" in requested,
        wants_result="RESULT" in requested,
        is_cancelled=request.is_cancelled if asks_cancelled else never,
        fault=fault,
    )


def write_response(result: ChunkResult, *, wants_text: bool = True) -> Any:
    """Only outputs that the request asked for may be in it.

    A response sender drops the others without the GIL, which breaks the heap of the process.
    """
    if result.error is not None:
        code = getattr(pb_utils.TritonError, result.error.triton_code)
        error = pb_utils.TritonError(str(result.error), code)
        return pb_utils.InferenceResponse(output_tensors=[], error=error)
    tensors = [_string_tensor("TRANSCRIPTS", result.text)] if wants_text else []
    if result.document is not None:
        tensors.append(_string_tensor("RESULT", json.dumps(result.document, ensure_ascii=False)))
    return pb_utils.InferenceResponse(tensors)


def answer_now(sender: Any, result: ChunkResult | None, *, wants_text: bool = True) -> None:
    """Sends the one answer of a request outside of `execute`'s list."""
    if result is None:
        result = ChunkResult(error=StepFailedError("the request was left without an answer"))
    response = write_response(result, wants_text=wants_text)
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def metric_family(reading: Reading) -> Any:
    """Triton's family for the metric that a reading is of."""
    family = pb_utils.MetricFamily
    kind = family.GAUGE if reading.kind == "gauge" else family.COUNTER
    return family(name=reading.name, description=reading.help, kind=kind)


def _fault(error: Exception) -> OasrError:
    if isinstance(error, OasrError):
        return error.without_history()
    logger.error("event=unreadable_request", exc_info=error)
    return InvalidRequestError(
        f"the request cannot be read ({shown(error)}); config.pbtxt tells what it may hold"
    )


def _stream_id(request: Any) -> StreamId:
    stream_id = request.correlation_id()
    return stream_id if isinstance(stream_id, str) else int(stream_id)


def _samples(request: Any) -> Samples | Pcm16:
    """The valid samples of the one audio input, of its type, which alone decides their scale."""
    tensors: dict[str, Any] = {tensor.name(): tensor for tensor in request.inputs()}
    wav, pcm16 = tensors.get("WAV"), tensors.get("PCM16")
    if (wav is None) == (pcm16 is None):
        given = "neither" if wav is None else "both"
        raise InvalidRequestError(f"{given} of WAV and PCM16 given; send exactly one of them")
    tensor: Any = wav if pcm16 is None else pcm16
    samples_S: Samples | Pcm16 = tensor.as_numpy().reshape(-1)
    if "WAV_LENS" in tensors:
        return samples_S[: _num_valid(tensors["WAV_LENS"], samples_S.size)]
    return samples_S


def _num_valid(tensor: Any, num_samples: int) -> int:
    values = tensor.as_numpy().reshape(-1)
    if values.size != 1 or not 0 <= values[0] <= num_samples:
        raise InvalidRequestError(
            f"WAV_LENS={shown(values.tolist())} does not fit the {num_samples} samples sent; give "
            f"one number of valid samples from 0 to {num_samples}, or leave WAV_LENS out"
        )
    return int(values[0])


def _parameters(request: Any) -> Mapping[str, ParameterValue]:
    text = request.parameters()
    if text in ("", "{}"):
        return {}
    parameters: dict[str, ParameterValue] = json.loads(text)
    # Keys with this prefix are the protocol's own.
    return {name: value for name, value in parameters.items() if not name.startswith("triton_")}


def _string_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode("utf-8")], dtype=np.object_))
