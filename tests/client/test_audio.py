from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from oasr_client.audio import iter_chunks, read_audio, read_raw, seconds, to_mono_16k
from oasr_client.errors import InvalidAudioError


def tone(rate_hz: int, *, duration_s: float = 1.0, frequency_hz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency_hz * np.arange(round(rate_hz * duration_s)) / rate_hz)


@pytest.mark.parametrize("rate_hz", [8000, 11025, 16000, 22050, 44100, 48000])
def test_a_tone_of_any_rate_becomes_the_same_tone_at_16_khz(tmp_path: Path, rate_hz: int) -> None:
    soundfile.write(tmp_path / "tone.wav", tone(rate_hz), rate_hz, subtype="FLOAT")
    samples = read_audio(tmp_path / "tone.wav")
    assert samples.dtype == np.float32
    assert abs(samples.size - 16000) <= 1
    middle = slice(2000, 14000)
    np.testing.assert_allclose(samples[middle], tone(16000)[middle], atol=2e-3)


def test_what_16_khz_cannot_hold_is_filtered_and_not_folded() -> None:
    beyond = to_mono_16k(tone(48000, frequency_hz=11000.0), 48000)
    assert np.abs(beyond[1000:-1000]).max() < 1e-3


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_channels_are_averaged(tmp_path: Path, suffix: str) -> None:
    left, right = tone(16000), tone(16000, frequency_hz=880.0)
    soundfile.write(tmp_path / f"a.{suffix}", np.stack([left, right], axis=1), 16000)
    middle = slice(1000, 15000)
    heard = read_audio(tmp_path / f"a.{suffix}")[middle]
    np.testing.assert_allclose(heard, (left + right)[middle] / 2, atol=0.03)


@pytest.mark.parametrize(
    ("encoding", "subtype", "tolerance"),
    [("pcm16", "PCM_16", 1e-4), ("mulaw", "ULAW", 0.02), ("alaw", "ALAW", 0.02)],
)
def test_files_without_a_header_are_read(
    tmp_path: Path, encoding: str, subtype: str, tolerance: float
) -> None:
    path = tmp_path / "call.raw"
    soundfile.write(path, tone(16000), 16000, format="RAW", subtype=subtype, endian="LITTLE")
    samples = read_raw(path, encoding, sample_rate_hz=16000)  # type: ignore[arg-type]
    np.testing.assert_allclose(samples, tone(16000), atol=tolerance)


def test_a_file_of_no_samples_is_empty_audio(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 44100)
    assert read_audio(tmp_path / "empty.wav").shape == (0,)


def test_files_that_are_no_audio_are_refused_by_name(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not audio")
    for path, remedy in ((text, "convert it"), (tmp_path / "absent.wav", "check the path")):
        with pytest.raises(InvalidAudioError, match=remedy) as caught:
            read_audio(path)
        assert str(path) in str(caught.value)
    with pytest.raises(InvalidAudioError, match="pcm16, mulaw, alaw"):
        read_raw(text, "opus")  # type: ignore[arg-type]


def test_what_is_no_plain_file_is_told_apart_from_what_is_absent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, Path(os.devnull), tmp_path / "pipe", Path("-")):
        with pytest.raises(InvalidAudioError, match=f"^{path}: not a plain file; write the audio"):
            read_audio(path)
    for path in (tmp_path / "absent.wav", Path(__file__) / "below-a-file.wav"):
        with pytest.raises(InvalidAudioError, match="no such file; check the path"):
            read_audio(path)
    with pytest.raises(InvalidAudioError, match="not accessible"):
        read_audio("a\0b")


@pytest.mark.parametrize("rate_hz", [3, 3999, 384001])
def test_rates_that_hold_no_speech_are_refused_before_the_samples(
    tmp_path: Path, rate_hz: int
) -> None:
    path = tmp_path / "odd.wav"
    soundfile.write(path, np.zeros(10), rate_hz)
    message = f"{rate_hz} Hz, expected 4000 to 384000; name the recording's own rate"
    with pytest.raises(InvalidAudioError, match=f"^{path}: the sample rate is {message}"):
        read_audio(path)
    with pytest.raises(InvalidAudioError, match=message):
        read_raw(path, sample_rate_hz=rate_hz)
    with pytest.raises(InvalidAudioError, match=message):
        to_mono_16k(np.zeros(10), rate_hz)


@pytest.mark.parametrize("rate_hz", [4000, 384000])
def test_the_lowest_and_the_highest_rate_are_read(tmp_path: Path, rate_hz: int) -> None:
    soundfile.write(tmp_path / "edge.wav", np.zeros(rate_hz), rate_hz)
    assert read_audio(tmp_path / "edge.wav").size == 16000


@pytest.mark.parametrize("num_samples", [0, 1, 159, 160, 161, 1600])
def test_chunks_hold_every_sample_once_and_there_is_always_one(num_samples: int) -> None:
    samples = np.arange(num_samples)
    chunks = list(iter_chunks(samples, 10))
    assert len(chunks) == max(1, -(-num_samples // 160))
    assert all(chunk.size == 160 for chunk in chunks[:-1])
    np.testing.assert_array_equal(np.concatenate(chunks), samples)


@pytest.mark.parametrize("chunk_ms", [-1.0, 0.01, 1e9, 1e308, math.inf, math.nan])
def test_a_chunk_below_one_sample_or_without_an_end_is_refused(chunk_ms: float) -> None:
    with pytest.raises(InvalidAudioError, match=r"0\.0625 \(one sample\) to 86400000"):
        list(iter_chunks(np.zeros(10), chunk_ms))


def test_seconds_are_those_of_16_khz() -> None:
    assert seconds(24000) == 1.5
