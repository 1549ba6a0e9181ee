"""Rates, encodings and scales over the wire; the texts themselves are measured in-process."""

from __future__ import annotations

import numpy as np
import pytest
import soxr

from oasr_backend.features import decode_mulaw
from tests.conftest import LiveServer
from tests.guards import wait_until
from tests.triton.conftest import Pcm16
from tests.triton.wire import Samples, Wire, metrics


@pytest.fixture(name="wire", params=["grpc", "http"])
def _wire(live_server: LiveServer, request: pytest.FixtureRequest) -> object:
    with Wire(live_server.server, live_server.model_name, request.param) as wire:
        yield wire


def resampled(pcm: Pcm16, rate: int) -> Samples:
    samples = pcm.astype(np.float32) / np.float32(32768)
    found: Samples = soxr.resample(samples, 16000, rate, quality="HQ")
    return found


def test_audio_at_48_khz_gives_the_text_of_16_khz(
    wire: Wire, recordings: list[Pcm16], expected: list[str]
) -> None:
    pieces = np.array_split(resampled(recordings[0], 48000), 7)
    assert wire.stream("48k", pieces, sample_rate=48000) == expected[0]


def test_mulaw_codes_in_pcm16_are_their_samples(wire: Wire, recordings: list[Pcm16]) -> None:
    table = decode_mulaw(np.arange(256, dtype=np.uint8))
    samples = resampled(recordings[0], 8000)
    codes = np.abs(samples[:, np.newaxis] - table).argmin(axis=1).astype(np.int16)
    parameters = {"sample_rate": 8000, "encoding": "mulaw"}
    coded = wire.stream("mulaw", np.array_split(codes, 5), **parameters)
    assert coded
    assert coded == wire.stream("linear", [table[codes]], sample_rate=8000)


def test_the_type_decides_the_scale_and_loud_audio_is_only_counted(
    live_server: LiveServer, wire: Wire, recordings: list[Pcm16], expected: list[str]
) -> None:
    def loud_chunks() -> float:
        found = metrics(live_server.server, live_server.model_name)
        return found["oasr_loud_chunks_total"]

    before = loud_chunks()
    as_float = recordings[0].astype(np.float32)
    assert wire.send("scaled", as_float / np.float32(32768), "SE") == expected[0]
    wire.send("unscaled", as_float, "SE")
    wait_until(lambda: loud_chunks() == before + 1, what="the chunk is counted")


def test_padding_behind_the_valid_samples_is_not_audio(
    wire: Wire, recordings: list[Pcm16], expected: list[str]
) -> None:
    padded = np.concatenate([recordings[0], np.full(5000, 20000, np.int16)])
    assert wire.send("padded", padded, "SE", valid=len(recordings[0])) == expected[0]
    as_float = padded.astype(np.float32) / np.float32(32768)
    as_float[len(recordings[0]) :] = np.nan
    assert wire.send("padded", as_float, "SE", valid=len(recordings[0])) == expected[0]
