"""Triton's gRPC requests as ready-made bytes: a request costs a concatenation and one call.

Protobuf merges the messages whose bytes are joined. So the part that names the stream and the
part that holds a chunk are serialised once each and joined for every request:

    head(id) + START | END | nothing + body(chunk)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
#: dtype on the command line -> (input's name, Triton's type, numpy's type).
INPUTS = {"pcm16": ("PCM16", "INT16", np.int16), "fp32": ("WAV", "FP32", np.float32)}
_PCM16_SCALE = 32768.0
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # Without it the channels of a process share one connection.
    ("grpc.use_local_subchannel_pool", 1),
)

Parameter = bool | int | float | str


def _flag(name: str) -> bytes:
    message = service_pb2.ModelInferRequest()
    message.parameters[name].bool_param = True
    return bytes(message.SerializeToString())


START = _flag("sequence_start")
END = _flag("sequence_end")


def head(
    model_name: str, sequence_id: int | str, parameters: Mapping[str, Parameter] | None = None
) -> bytes:
    """Which model and which stream; `parameters` are the stream's options, for START only."""
    message = service_pb2.ModelInferRequest(model_name=model_name)
    for name, value in {"sequence_id": sequence_id, **(parameters or {})}.items():
        _set_parameter(message.parameters[name], value)
    return bytes(message.SerializeToString())


def _set_parameter(slot: Any, value: Parameter) -> None:
    if isinstance(value, bool):
        slot.bool_param = value
    elif isinstance(value, int):
        slot.int64_param = value
    elif isinstance(value, float):
        slot.double_param = value
    else:
        slot.string_param = value


def body(samples_S: npt.NDArray[Any], dtype: str) -> bytes:
    """A chunk in the wire's type, int16 or float32; the one output asked for is the text."""
    name, triton_type, numpy_type = INPUTS[dtype]
    return raw_body(
        samples_S.astype(numpy_type, copy=False).tobytes(),
        name=name,
        triton_type=triton_type,
        shape=(1, samples_S.size),
    )


def raw_body(data: bytes, *, name: str, triton_type: str, shape: tuple[int, ...]) -> bytes:
    """Any tensor, also one that the server has to refuse."""
    message = service_pb2.ModelInferRequest()
    message.inputs.add(name=name, datatype=triton_type, shape=list(shape))
    message.outputs.add(name="TRANSCRIPTS")
    message.raw_input_contents.append(data)
    return bytes(message.SerializeToString())


def to_dtype(samples_S: npt.NDArray[np.int16], dtype: str) -> npt.NDArray[Any]:
    """int16 samples as the wire wants them; the type alone decides the scale."""
    if dtype == "pcm16":
        return samples_S
    return samples_S.astype(np.float32) / np.float32(_PCM16_SCALE)


def text_of(response: bytes) -> str:
    """The text of an answer, whose first output is one string behind its length."""
    return _text(service_pb2.ModelInferResponse.FromString(response))


def _text(message: Any) -> str:
    contents: bytes = message.raw_output_contents[0]
    return contents[4:].decode("utf-8")


class AnswerError(Exception):
    """An error that came as one answer of a call, which goes on."""


class InferChannel:
    """One connection of an event loop; requests and answers are bytes."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.aio.insecure_channel(url, options=_CHANNEL_OPTIONS)
        # No serialisers: the bytes pass as they are.
        self._infer = self._channel.unary_unary(INFER_METHOD)
        self._stream_infer = self._channel.stream_stream(STREAM_INFER_METHOD)

    def call(self, request: bytes, deadline_s: float) -> Any:
        """An awaitable grpc.aio call that can be cancelled; raises grpc.aio.AioRpcError."""
        return self._infer(request, timeout=deadline_s)

    async def ask(self, request: bytes, deadline_s: float) -> str:
        """The text of the answer. Raises grpc.aio.AioRpcError."""
        return text_of(await self.call(request, deadline_s))

    def open_stream(self) -> InferStream:
        """One call for many requests, each sent when the one before is answered."""
        return InferStream(self._stream_infer())

    async def connect(self, timeout_s: float) -> None:
        """Raises TimeoutError of asyncio when no server answers."""
        await asyncio.wait_for(self._channel.channel_ready(), timeout_s)

    async def close(self) -> None:
        await self._channel.close()


class InferStream:
    """One streaming call, as a caller holds it for as long as it speaks.

    It ends with its channel. After an error it is of no use any more: it has ended, or its next
    answer is a late one.
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    async def ask(self, request: bytes, deadline_s: float) -> str:
        """The text of the answer. Raises AnswerError, grpc.aio.AioRpcError and TimeoutError."""
        answer = grpc.aio.EOF
        if not self._call.done():
            await self._call.write(request)
            answer = await asyncio.wait_for(self._call.read(), deadline_s)
        if answer is grpc.aio.EOF:
            raise AnswerError(f"the call ended: {await self._call.code()}")
        message = service_pb2.ModelStreamInferResponse.FromString(answer)
        if message.error_message:
            raise AnswerError(message.error_message)
        return _text(message.infer_response)
