"""Requests as plain tritonclient sends them, good and bad alike."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException

from oasr_backend.serve.process import TritonServer
from oasr_backend.types import StreamId
from tests.guards import GUARD_S

Samples = npt.NDArray[Any]
NOTHING = np.zeros(0, np.float32)
_KINDS = {"float32": ("WAV", "FP32"), "int16": ("PCM16", "INT16")}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def tensor(module: Any, name: str, values: Samples, kind: str = "") -> Any:
    """Of shape (1, N); `kind` is Triton's name of the type, by default that of the values."""
    kind = kind or {"float32": "FP32", "int16": "INT16", "int32": "INT32"}[str(values.dtype)]
    found = module.InferInput(name, [1, values.size], kind)
    found.set_data_from_numpy(values.reshape(1, -1))
    return found


def audio(module: Any, samples: Samples, *, valid: int | None = None) -> list[Any]:
    """The dtype decides between WAV and PCM16; `valid` becomes WAV_LENS."""
    name, kind = _KINDS[str(samples.dtype)]
    tensors = [tensor(module, name, samples, kind)]
    if valid is not None:
        tensors.append(tensor(module, "WAV_LENS", np.array([valid], np.int32)))
    return tensors


def sequence(stream_id: StreamId, flags: str) -> dict[str, Any]:
    return {
        "sequence_id": stream_id,
        "sequence_start": "S" in flags,
        "sequence_end": "E" in flags,
    }


def text_of(result: Any) -> str:
    (text,) = result.as_numpy("TRANSCRIPTS")
    return str(text.decode())


class Wire:
    """A blocking client of one model; `send` returns the text or raises."""

    def __init__(self, server: TritonServer, model_name: str, protocol: str = "grpc") -> None:
        self._module = tritonclient.grpc if protocol == "grpc" else tritonclient.http
        url = server.grpc_url if protocol == "grpc" else server.http_url
        self.client = self._module.InferenceServerClient(url)
        self._model_name = model_name

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.client.close()

    def send(
        self,
        stream_id: StreamId,
        samples: Samples = NOTHING,
        flags: str = "",
        *,
        valid: int | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> str:
        result = self.client.infer(
            self._model_name,
            audio(self._module, samples, valid=valid),
            parameters=dict(parameters or {}) or None,
            **sequence(stream_id, flags),
        )
        return text_of(result)

    def document(
        self,
        stream_id: StreamId,
        samples: Samples,
        flags: str,
        *,
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The RESULT document."""
        result = self.client.infer(
            self._model_name,
            audio(self._module, samples),
            outputs=[self._module.InferRequestedOutput(n) for n in ("TRANSCRIPTS", "RESULT")],
            parameters=dict(parameters or {}) or None,
            **sequence(stream_id, flags),
        )
        document: dict[str, Any] = json.loads(result.as_numpy("RESULT")[0])
        assert document["text"] == text_of(result)
        return document

    def stream(self, stream_id: StreamId, pieces: Sequence[Samples], **parameters: Any) -> str:
        """One utterance, piece by piece; the final text."""
        text = ""
        for index, piece in enumerate(pieces):
            flags = ("S" if index == 0 else "") + ("E" if index == len(pieces) - 1 else "")
            text = self.send(stream_id, piece, flags, parameters=parameters if index == 0 else None)
        return text


class AsyncWire:
    """A gRPC client of one model for many requests at once; make it in the event loop."""

    def __init__(self, server: TritonServer, model_name: str) -> None:
        self.client = tritonclient.grpc.aio.InferenceServerClient(server.grpc_url)
        self._model_name = model_name

    async def __aenter__(self) -> AsyncWire:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.client.close()

    async def send(
        self,
        stream_id: StreamId,
        samples: Samples = NOTHING,
        flags: str = "",
        *,
        parameters: Mapping[str, Any] | None = None,
    ) -> str:
        return await self.send_tensors(
            stream_id, audio(tritonclient.grpc, samples), flags, parameters=parameters
        )

    async def send_tensors(
        self,
        stream_id: StreamId,
        tensors: Sequence[Any],
        flags: str = "",
        *,
        parameters: Mapping[str, Any] | None = None,
    ) -> str:
        result = await self.client.infer(
            self._model_name,
            list(tensors),
            parameters=dict(parameters or {}) or None,
            client_timeout=GUARD_S,
            **sequence(stream_id, flags),
        )
        return text_of(result)

    async def stream(self, stream_id: StreamId, pieces: Sequence[Samples]) -> str:
        text = ""
        for index, piece in enumerate(pieces):
            flags = ("S" if index == 0 else "") + ("E" if index == len(pieces) - 1 else "")
            text = await self.send(stream_id, piece, flags)
        return text


def run_async(
    server: TritonServer, model_name: str, act: Callable[[AsyncWire], Awaitable[Any]]
) -> Any:
    """`act` with a client of its own, in a fresh event loop."""

    async def main() -> Any:
        async with AsyncWire(server, model_name) as wire:
            return await asyncio.wait_for(act(wire), timeout=GUARD_S)

    return asyncio.run(main())


def status_of(error: InferenceServerException) -> str:
    """INVALID_ARGUMENT and its like, without gRPC's prefix."""
    return str(error.status()).rpartition(".")[2]


def metrics(server: TritonServer, model_name: str) -> dict[str, float]:
    """Custom metrics of one model: `name` or `name{reason="..."}` to value."""
    with _OPENER.open(server.metrics_url, timeout=GUARD_S) as response:
        text = response.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^(oasr_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if pairs.pop("model") == model_name:
            pairs.pop("instance")
            more = ",".join(f'{key}="{pairs[key]}"' for key in sorted(pairs))
            found[f"{name}{{{more}}}" if more else name] = float(value)
    return found
