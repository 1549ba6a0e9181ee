"""`oasr_client` against a model with a longest length: it hears all, in chunks of any size."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from oasr_client import RetryPolicy, StreamEndedError, StreamingClient, iter_chunks

from tests.conftest import Clip
from tests.guards import GUARD_S
from tests.result_schema import check_document
from tests.triton.conftest import Pcm16
from tests.triton.variants import LoadedModel, Variant, VariantServer

NUM_BLOCKS = 8
#: 8 blocks of 16 frames of 40 ms.
LONGEST_S = 5.12
WORDS = {"word_times": True, "endpoint": True}


@pytest.fixture(scope="module", name="capped")
def _capped(variant_server: VariantServer) -> Iterator[LoadedModel]:
    settings = {"num_left_chunks": "-1", "max_blocks_per_seq": str(NUM_BLOCKS), "max_streams": "4"}
    with variant_server.loaded(Variant("capped_demo", settings)) as model:
        yield model


@pytest.fixture(scope="module", name="talk")
def _talk(clips: list[Clip]) -> Pcm16:
    """Four clips, 17.3 s of speech."""
    return np.concatenate([soundfile.read(clip.path, dtype="int16")[0] for clip in clips[:4]])


@pytest.fixture(scope="module", name="documents")
def _documents(capped: LoadedModel, talk: Pcm16) -> list[dict[str, Any]]:
    """The model's text of each stretch of the longest length, as a stream of its own."""
    length = round(LONGEST_S * 16000)
    with capped.wire() as wire:
        return [
            wire.document(1 + begin, talk[begin:], "SE", parameters=WORDS)
            for begin in range(0, talk.size, length)
        ]


def heard(capped: LoadedModel, talk: Pcm16, *, chunk_ms: float, protocol: str) -> Any:
    server = capped.server
    url = server.grpc_url if protocol == "grpc" else server.http_url
    settings = {"protocol": protocol, "model_name": capped.name, "options": WORDS}
    with (
        StreamingClient(url, want_result=True, **settings) as client,
        client.stream() as stream,
    ):
        *firsts, last = iter_chunks(talk, chunk_ms)
        for chunk in firsts:
            assert not stream.send(chunk).is_final
        return stream.finish(last)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("chunk_ms", [320, 640, 20_000])
def test_a_stream_beyond_the_longest_length_is_heard_whole(
    capped: LoadedModel,
    documents: list[dict[str, Any]],
    talk: Pcm16,
    chunk_ms: float,
    protocol: str,
) -> None:
    final = heard(capped, talk, chunk_ms=chunk_ms, protocol=protocol)
    assert [document["finish_reason"] for document in documents] == ["length"] * 3 + ["end"]
    assert final.text == " ".join(document["text"] for document in documents if document["text"])
    result = check_document(final.result)
    assert result["audio_s"] == pytest.approx(talk.size / 16000, abs=0.001)
    assert result["finish_reason"] == "end"
    for name in ("tokens", "words", "segments"):
        starts_s = [
            round(entry["start_s"] + number * LONGEST_S, 3)
            for number, document in enumerate(documents)
            for entry in document[name]
        ]
        assert [entry["start_s"] for entry in result[name]] == starts_s
    assert len(result["words"]) > 20


def run_command(capped: LoadedModel, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oasr_client", "--url", capped.server.grpc_url]
    command += ["--model", capped.name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)


def test_the_command_loses_nothing_in_captions_json_and_text(
    capped: LoadedModel, documents: list[dict[str, Any]], talk: Pcm16, tmp_path: Path
) -> None:
    path = tmp_path / "talk.wav"
    soundfile.write(path, talk, 16000)
    text = " ".join(document["text"] for document in documents if document["text"])
    long_chunks = [path, "--chunk-ms", "20000"]
    assert run_command(capped, *long_chunks).stdout == f"{text}\n"
    line = json.loads(run_command(capped, *long_chunks, "--json", "--format", "json").stdout)
    assert (line["text"], line["result"]["text"]) == (text, text)
    assert line["audio_s"] == round(talk.size / 16000, 4)
    captions = run_command(capped, *long_chunks, "--format", "srt").stdout
    cues = [cue.split("\n") for cue in captions.strip().split("\n\n")]
    assert " ".join(cue[2] for cue in cues) == text
    starts = [cue[1][:12] for cue in cues]
    assert all(one < other for one, other in itertools.pairwise(starts))
    assert starts[-1] > "00:00:12"


def test_what_is_not_heard_is_told_where_restarts_are_not_allowed(
    capped: LoadedModel, talk: Pcm16
) -> None:
    settings = {"model_name": capped.name, "retry": RetryPolicy(max_restarts=0)}
    with StreamingClient(capped.server.grpc_url, **settings) as client:
        with client.stream() as stream, pytest.raises(StreamEndedError) as at_end:
            stream.finish(talk)
        with client.stream() as stream:
            stream.send(talk[: 6 * 16000])
            with pytest.raises(StreamEndedError) as later:
                stream.send(talk[6 * 16000 : 10 * 16000])
    unheard_s = talk.size / 16000 - LONGEST_S
    assert f"{unheard_s:.2f} s of the audio sent, from 5.12 s on, were not heard" in str(
        at_end.value
    )
    assert "4.88 s of the audio sent, from 5.12 s on, were not heard" in str(later.value)
