"""What clients of other Triton ASR servers send, unchanged; the folder is renamed as they expect.

Also the load as such: warm-up requests in config.pbtxt, and the first requests after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

from tests.guards import wait_until
from tests.triton.conftest import Pcm16
from tests.triton.variants import LoadedModel, Variant, VariantServer
from tests.triton.wire import AsyncWire, Samples, run_async

FIRST_CHUNK_MS, CHUNK_MS = 690, 640
WARMUP = """
model_warmup [
  { name: "a second of silence" batch_size: 1 count: 3
    inputs { key: "WAV" value { data_type: TYPE_FP32 dims: [ 16000 ] zero_data: true } } },
  { name: "a second of noise" batch_size: 1
    inputs { key: "PCM16" value { data_type: TYPE_INT16 dims: [ 16000 ] random_data: true } } }
]
"""


@pytest.fixture(scope="module", name="model")
def _model(variant_server: VariantServer) -> Iterator[LoadedModel]:
    with variant_server.loaded(Variant("streaming_wenet", more=WARMUP)) as model:
        yield model


def test_the_first_requests_after_a_cold_start_and_a_warm_up_are_served(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str]
) -> None:
    wait_until(lambda: bool(model.metrics()), what="metrics are published")
    assert model.metrics()["oasr_streams_opened_total"] == 0, "warm-up opens no stream"

    async def act(wire: AsyncWire) -> list[str]:
        return await asyncio.gather(
            *(wire.stream(1 + i, np.array_split(recordings[i], 5)) for i in range(8))
        )

    assert run_async(model.server, model.name, act) == expected[:8]


def padded_chunks(pcm: Pcm16) -> list[tuple[Samples, int]]:
    """Chunks of a whole length each, the last one zero-padded, and their valid samples."""
    samples = pcm.astype(np.float32) / np.float32(32768)
    chunks: list[tuple[Samples, int]] = []
    start = 0
    while start < len(samples):
        size = 16 * (CHUNK_MS if chunks else FIRST_CHUNK_MS)
        part = samples[start : start + size]
        chunk = np.zeros((1, size), np.float32)
        chunk[0, : len(part)] = part
        chunks.append((chunk, len(part)))
        start += size
    return chunks


def inputs_of(module: Any, chunk: Samples, valid: int) -> list[Any]:
    wav = module.InferInput("WAV", list(chunk.shape), "FP32")
    wav.set_data_from_numpy(chunk)
    lengths = module.InferInput("WAV_LENS", [1, 1], "INT32")
    lengths.set_data_from_numpy(np.array([[valid]], np.int32))
    return [wav, lengths]


def test_concurrent_tasks_that_reuse_integer_ids_join_the_transcripts(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str]
) -> None:
    module = tritonclient.grpc
    outputs = [module.InferRequestedOutput("TRANSCRIPTS")]

    async def task(client: Any, task_index: int) -> list[str]:
        texts = []
        for pcm in recordings[task_index : task_index + 3]:
            chunks = padded_chunks(pcm)
            for index, (chunk, valid) in enumerate(chunks):
                response = await client.infer(
                    "streaming_wenet",
                    inputs_of(module, chunk, valid),
                    request_id=f"{task_index}-{index}",
                    outputs=outputs,
                    sequence_id=task_index + 10086,
                    sequence_start=index == 0,
                    sequence_end=index == len(chunks) - 1,
                )
            texts.append(b" ".join(response.as_numpy("TRANSCRIPTS")).decode("utf-8"))
        return texts

    async def main() -> list[list[str]]:
        client = tritonclient.grpc.aio.InferenceServerClient(model.server.grpc_url)
        try:
            return await asyncio.gather(*(task(client, index) for index in range(6)))
        finally:
            await client.close()

    assert asyncio.run(main()) == [expected[index : index + 3] for index in range(6)]


@pytest.mark.parametrize("module", [tritonclient.grpc, tritonclient.http])
def test_a_client_that_decodes_the_first_element_reads_the_text(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str], module: Any
) -> None:
    url = model.server.grpc_url if module is tritonclient.grpc else model.server.http_url
    chunks = padded_chunks(recordings[0])
    with module.InferenceServerClient(url) as client:
        for index, (chunk, valid) in enumerate(chunks):
            response = client.infer(
                "streaming_wenet",
                inputs_of(module, chunk, valid),
                sequence_id=999,
                sequence_start=index == 0,
                sequence_end=index == len(chunks) - 1,
            )
            transcripts = response.as_numpy("TRANSCRIPTS")
            assert transcripts.shape == (1,)
    assert transcripts[0].decode() == expected[0]


def test_one_grpc_stream_carries_many_sequences_in_order(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str]
) -> None:
    answers: dict[str, list[str]] = {"1": [], "2": []}
    errors: list[Any] = []
    module = tritonclient.grpc

    def note(result: Any, error: Any) -> None:
        if error is not None:
            errors.append(error)
            return
        stream_id = result.get_response().id
        answers[stream_id].append(result.as_numpy("TRANSCRIPTS")[0].decode())

    with module.InferenceServerClient(model.server.grpc_url) as client:
        client.start_stream(note)
        per_stream = [padded_chunks(recordings[index]) for index in range(2)]
        for index in range(max(map(len, per_stream))):
            for stream_id, chunks in enumerate(per_stream, start=1):
                if index < len(chunks):
                    client.async_stream_infer(
                        "streaming_wenet",
                        inputs_of(module, *chunks[index]),
                        request_id=str(stream_id),
                        sequence_id=stream_id,
                        sequence_start=index == 0,
                        sequence_end=index == len(chunks) - 1,
                    )
        wait_until(
            lambda: all(len(answers[str(i + 1)]) == len(per_stream[i]) for i in range(2)),
            what="every chunk is answered",
        )
        client.stop_stream()
    assert errors == []
    for texts, final in zip(answers.values(), expected, strict=False):
        assert texts[-1] == final
        assert [len(text) for text in texts] == sorted(len(text) for text in texts)
