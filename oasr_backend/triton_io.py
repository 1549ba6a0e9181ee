"""Triton requests to audio chunks, results to Triton responses. No other module sees Triton.

The shapes and rules of the wire are those of config.pbtxt; a test holds the two together.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from oasr_backend.errors import InvalidRequestError, OasrError
from oasr_backend.types import AudioChunk, ChunkResult, ParameterValue, Samples, StreamId

#: Requests of Triton's model warm-up carry no sequence; nothing is kept for them.
WARMUP_IDS = (0, "")
_PCM16_SCALE = np.float32(1.0 / 32768.0)


def is_warmup(request: Any) -> bool:
    return request.correlation_id() in WARMUP_IDS


def read_chunk(request: Any) -> AudioChunk | OasrError:
    """What one request says, or the error that answers it; never raises for a bad request."""
    try:
        flags = request.flags()
        return AudioChunk(
            stream_id=_stream_id(request),
            samples_S=_samples(request),
            is_first=bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            is_last=bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
            parameters=_parameters(request),
            wants_result="RESULT" in request.requested_output_names(),
            is_cancelled=request.is_cancelled,
        )
    except OasrError as error:
        return error


def write_response(result: ChunkResult) -> Any:
    if result.error is not None:
        code = getattr(pb_utils.TritonError, result.error.triton_code)
        error = pb_utils.TritonError(str(result.error), code)
        return pb_utils.InferenceResponse(output_tensors=[], error=error)
    tensors = [_string_tensor("TRANSCRIPTS", result.text)]
    if result.document is not None:
        tensors.append(_string_tensor("RESULT", json.dumps(result.document, ensure_ascii=False)))
    return pb_utils.InferenceResponse(output_tensors=tensors)


class TritonLogHandler(logging.Handler):
    """Sends the package's log records to the server's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        write = {
            "ERROR": pb_utils.Logger.log_error,
            "WARNING": pb_utils.Logger.log_warn,
            "INFO": pb_utils.Logger.log_info,
        }.get(record.levelname, pb_utils.Logger.log_verbose)
        write(self.format(record))


def _stream_id(request: Any) -> StreamId:
    stream_id = request.correlation_id()
    return stream_id if isinstance(stream_id, str) else int(stream_id)


def _samples(request: Any) -> Samples:
    """The valid samples of the one audio input, as float32 in [-1, 1].

    The dtype alone decides the scale: an amplitude says nothing about it.
    """
    wav = pb_utils.get_input_tensor_by_name(request, "WAV")
    pcm16 = pb_utils.get_input_tensor_by_name(request, "PCM16")
    if (wav is None) == (pcm16 is None):
        given = "neither" if wav is None else "both"
        raise InvalidRequestError(f"{given} of WAV and PCM16 given; send exactly one of them")
    samples = (wav if pcm16 is None else pcm16).as_numpy().reshape(-1)
    samples = samples[: _num_valid(request, samples.size)]
    if pcm16 is not None:
        return samples.astype(np.float32) * _PCM16_SCALE
    return samples.astype(np.float32, copy=False)


def _num_valid(request: Any, num_samples: int) -> int:
    tensor = pb_utils.get_input_tensor_by_name(request, "WAV_LENS")
    if tensor is None:
        return num_samples
    values = tensor.as_numpy().reshape(-1)
    if values.size != 1 or not 0 <= values[0] <= num_samples:
        raise InvalidRequestError(
            f"WAV_LENS={values.tolist()} does not fit the {num_samples} samples sent; give one "
            f"number of valid samples from 0 to {num_samples}, or leave WAV_LENS out"
        )
    return int(values[0])


def _parameters(request: Any) -> dict[str, ParameterValue]:
    text = request.parameters()
    parameters: dict[str, ParameterValue] = json.loads(text) if text else {}
    return parameters


def _string_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode("utf-8")], dtype=np.object_))
