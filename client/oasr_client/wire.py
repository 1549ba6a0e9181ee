"""One chunk as Triton sees it: building the request, reading the response.

`tensors` is `tritonclient.grpc` or `tritonclient.http`: the two modules have the same classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from oasr_client.errors import ClientError, InvalidAudioError

#: A Triton correlation id. The integer 42 and the string "42" are two streams.
SequenceId = int | str
#: The types that Triton carries as a request parameter.
OptionValue = bool | int | float | str
Samples = npt.NDArray[Any]

_INPUTS = {"pcm16": ("PCM16", "INT16"), "fp32": ("WAV", "FP32")}
_PCM16_SCALE = 32768.0
OUTPUTS = ("TRANSCRIPTS", "RESULT")


@dataclass(frozen=True, eq=False)
class ChunkRequest:
    """`samples` are in the wire's type, 1-D, and may be empty."""

    sequence_id: SequenceId
    samples: Samples
    is_start: bool = False
    is_end: bool = False
    options: Mapping[str, OptionValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    text: str
    result: dict[str, Any] | None = None


def to_wire(samples: npt.ArrayLike, dtype: str) -> Samples:
    """Mono samples, floats in [-1, 1] or int16, as int16 ("pcm16") or float32 ("fp32").

    The type decides the scale, never the amplitude: floats beyond [-1, 1] are clipped for pcm16.
    """
    array = np.asarray(samples)
    if array.ndim != 1:
        raise InvalidAudioError(
            f"samples have shape {array.shape}, expected one dimension; average the channels first"
        )
    is_float = np.issubdtype(array.dtype, np.floating)
    if not is_float and array.dtype != np.int16 and array.size:
        raise InvalidAudioError(
            f"samples are {array.dtype}, expected floats in [-1, 1] or int16; convert them first"
        )
    if dtype == "fp32":
        scale = np.float32(1.0 if is_float else _PCM16_SCALE)
        return np.asarray(array.astype(np.float32) / scale)
    return _pcm16(array) if is_float else array.astype(np.int16)


def _pcm16(samples: Samples) -> Samples:
    if not np.isfinite(samples).all():
        raise InvalidAudioError("samples hold NaN or infinity; remove them before sending")
    scaled: Samples = np.clip(np.rint(samples * _PCM16_SCALE), -32768, 32767)
    return scaled.astype(np.int16)


def wire_dtype(dtype: str) -> np.dtype[Any]:
    """The samples' type for "pcm16" or "fp32"."""
    return np.dtype(np.int16 if dtype == "pcm16" else np.float32)


def infer_arguments(request: ChunkRequest, *, tensors: ModuleType, dtype: str) -> dict[str, Any]:
    """Keyword arguments of `infer`, the same for all four clients of tritonclient.

    The request always asks for RESULT: only there the server says that it ended the stream.
    """
    name, triton_type = _INPUTS[dtype]
    audio_1N = request.samples[np.newaxis, :]
    audio = tensors.InferInput(name, list(audio_1N.shape), triton_type)
    audio.set_data_from_numpy(audio_1N)
    return {
        "inputs": [audio],
        "outputs": [tensors.InferRequestedOutput(output) for output in OUTPUTS],
        "sequence_id": request.sequence_id,
        "sequence_start": request.is_start,
        "sequence_end": request.is_end,
        "parameters": dict(request.options) or None,
    }


def parse_reply(response: Any) -> Reply:
    """`response` is an `InferResult` of either protocol."""
    return Reply(_string(response, "TRANSCRIPTS"), _document(_string(response, "RESULT")))


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ClientError(f"RESULT is not a JSON object: {text[:80]!r}; is this the right model?")
    return document


def _string(response: Any, name: str) -> str:
    tensor = response.as_numpy(name)
    if tensor is None or tensor.size == 0:
        raise ClientError(
            f"the response holds no {name}; is this the streaming model? "
            "(a server running numpy >= 2 in its Python backend also answers empty)"
        )
    value = tensor.reshape(-1)[0]
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class Endpoint:
    """Where the model is and how it is addressed; `headers` go with every request."""

    url: str
    model_name: str
    dtype: str
    tls: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, request: ChunkRequest, tensors: ModuleType) -> dict[str, Any]:
        arguments = infer_arguments(request, tensors=tensors, dtype=self.dtype)
        # A fresh dict: tritonclient's HTTP clients write their own headers into it.
        return {"model_name": self.model_name, "headers": dict(self.headers), **arguments}
