"""The client against the shipped model: one text, whichever way the audio travels."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import soundfile
import soxr
from oasr_client import (
    AsyncStreamingClient,
    RequestRejectedError,
    StreamingClient,
    iter_chunks,
    read_audio,
)

from tests.guards import GUARD_S


class Server(Protocol):
    http_url: str
    grpc_url: str
    model_name: str


class Clip(Protocol):
    path: Path
    text: str


def settings_for(server: Server, protocol: str, **more: Any) -> dict[str, Any]:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    return {"url": url, "protocol": protocol, "model_name": server.model_name, **more}


def final_text(client: StreamingClient, samples: np.ndarray, chunk_ms: float) -> str:
    with client.stream() as stream:
        for chunk in iter_chunks(samples, chunk_ms):
            stream.send(chunk)
        return stream.finish().text


@pytest.fixture(scope="module")
def expected(live_server: Server, clips: list[Clip]) -> list[str]:
    """Each clip in one request."""
    with StreamingClient(**settings_for(live_server, "grpc")) as client:
        texts = []
        for clip in clips:
            with client.stream() as stream:
                texts.append(stream.finish(read_audio(clip.path)).text)
    return texts


def test_the_model_hears_most_of_what_was_said(clips: list[Clip], expected: list[str]) -> None:
    said = [word for clip in clips for word in clip.text.split()]
    heard = {word for text in expected for word in text.split()}
    assert sum(word in heard for word in said) > 0.5 * len(said)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("dtype", ["pcm16", "fp32"])
@pytest.mark.parametrize("chunk_ms", [37.0, 640.0, 5000.0])
def test_the_way_of_the_audio_does_not_change_the_text(
    live_server: Server,
    clips: list[Clip],
    expected: list[str],
    protocol: str,
    dtype: str,
    chunk_ms: float,
) -> None:
    with StreamingClient(**settings_for(live_server, protocol, dtype=dtype)) as client:
        for clip, text in zip(clips[:3], expected[:3], strict=True):
            assert final_text(client, read_audio(clip.path), chunk_ms) == text


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_all_clips_at_once_are_each_their_own(
    live_server: Server, clips: list[Clip], expected: list[str], protocol: str
) -> None:
    async def one(client: AsyncStreamingClient, clip: Clip) -> str:
        async with client.stream() as stream:
            for chunk in iter_chunks(read_audio(clip.path), 320):
                await stream.send(chunk)
            return (await stream.finish()).text

    async def run() -> list[str]:
        async with AsyncStreamingClient(**settings_for(live_server, protocol)) as client:
            return await asyncio.gather(*(one(client, clip) for clip in clips))

    assert asyncio.run(run()) == expected


def test_partials_grow_into_the_final_text(live_server: Server, clips: list[Clip]) -> None:
    with (
        StreamingClient(**settings_for(live_server, "grpc", want_result=True)) as client,
        client.stream() as stream,
    ):
        partials = [stream.send(chunk) for chunk in iter_chunks(read_audio(clips[0].path), 640)]
        final = stream.finish()
    lengths = [len(update.text) for update in partials]
    assert lengths == sorted(lengths)
    assert 0 < lengths[-1] <= len(final.text)
    assert final.result is not None
    assert final.result["text"] == final.text
    assert [update.is_final for update in partials] == [False] * len(partials)
    assert final.is_final


def test_a_stream_of_no_samples_has_an_empty_text(live_server: Server) -> None:
    for protocol in ("grpc", "http"):
        with StreamingClient(**settings_for(live_server, protocol)) as client:
            with client.stream() as stream:
                assert stream.finish().text == ""
            with client.stream("by-name") as stream:
                assert stream.send([]).text == ""
                assert stream.finish([]).text == ""


def test_an_unknown_option_is_rejected_with_the_nearest(live_server: Server) -> None:
    with StreamingClient(**settings_for(live_server, "grpc")) as client:
        stream = client.stream(options={"sample_rat": 8000})
        with stream, pytest.raises(RequestRejectedError, match="sample_rate"):
            stream.send(np.zeros(10))


def test_other_rates_and_channels_are_resampled_by_the_client(
    live_server: Server, clips: list[Clip], expected: list[str], tmp_path: Path
) -> None:
    samples = soxr.resample(read_audio(clips[0].path), 16000, 48000, quality="VHQ")
    stereo = tmp_path / "stereo48.flac"
    soundfile.write(stereo, np.stack([samples, samples], axis=1), 48000)
    with StreamingClient(**settings_for(live_server, "grpc")) as client:
        text = final_text(client, read_audio(stereo), 640)
    pairs = zip(text.split(), expected[0].split(), strict=False)
    assert sum(a == b for a, b in pairs) >= 0.7 * len(expected[0].split())


def test_captions_follow_the_words_without_an_option(
    live_server: Server, clips: list[Clip], expected: list[str]
) -> None:
    command = [sys.executable, "-m", "oasr_client", "--url", live_server.grpc_url]
    command += ["--format", "srt", str(clips[0].path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=True)
    cues = [cue.split("\n") for cue in done.stdout.strip().split("\n\n")]
    assert " ".join(text for _, _, text in cues) == expected[0]
    # A caption for the whole file, which needs no words, starts with the file.
    assert not cues[0][1].startswith("00:00:00,000")


def test_the_command_scores_the_demo_test_set(
    live_server: Server, clips: list[Clip], expected: list[str]
) -> None:
    manifest = clips[0].path.parent / "manifest.json"
    command = [sys.executable, "-m", "oasr_client", "--url", live_server.grpc_url]
    command += ["--manifest", str(manifest), "--parallel", "5", "--json", "--no-partials"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=True)
    *finals, score = [json.loads(line) for line in done.stdout.splitlines()]
    texts = {Path(line["file"]).name: line["text"] for line in finals}
    assert texts == {clip.path.name: text for clip, text in zip(clips, expected, strict=True)}
    assert score["files"] == len(clips)
    assert 0 < score["wer"] < 0.5
