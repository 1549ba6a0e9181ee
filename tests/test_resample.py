"""Resampling and codecs take any cutting, and add neither aliases nor delay."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.errors import InvalidRequestError, StreamStateError
from oasr_backend.features.codecs import decode_alaw, decode_mulaw
from oasr_backend.features.resample import StreamingResampler

pytestmark = pytest.mark.numerics

Samples = npt.NDArray[np.float32]
#: The resampler's "HQ" promises 20 bits, of which float32 keeps all: one in the last of them.
HQ_ERROR = 2.0**-20
RATES = (8000, 11025, 22050, 24000, 32000, 44100, 48000)


def tone(freq_hz: float, rate: int, seconds: float = 1.0) -> Samples:
    time_s = np.arange(int(rate * seconds)) / rate
    return np.asarray(0.5 * np.sin(2 * np.pi * freq_hz * time_s), dtype=np.float32)


def resample(samples: Samples, rate: int, cuts: list[int]) -> Samples:
    resampler = StreamingResampler(rate, 16000)
    pieces = [resampler.accept(piece) for piece in np.split(samples, sorted(cuts))]
    return np.concatenate([*pieces, resampler.finish()])


@settings(max_examples=40)
@given(rate=st.sampled_from(RATES), cuts=st.lists(st.integers(0, 8000), max_size=10))
def test_any_cutting_gives_the_same_samples_bit_for_bit(rate: int, cuts: list[int]) -> None:
    samples = np.random.default_rng(rate).standard_normal(8000).astype(np.float32) * 0.1
    assert np.array_equal(resample(samples, rate, cuts), resample(samples, rate, []))


def test_single_samples_give_the_same_as_the_whole() -> None:
    samples = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * 0.1
    cuts = list(range(1, 4000))
    assert np.array_equal(resample(samples, 8000, cuts), resample(samples, 8000, []))


@pytest.mark.parametrize("rate", RATES)
def test_a_tone_keeps_its_place_in_time(rate: int) -> None:
    output = resample(tone(440.0, rate), rate, [1000, 5000])
    assert output.dtype == np.float32
    assert output.size == 16000
    middle = slice(2000, 14000)
    assert np.abs(output - tone(440.0, 16000))[middle].max() <= HQ_ERROR


def test_what_lies_above_the_new_nyquist_frequency_is_gone() -> None:
    output = resample(tone(10000.0, 48000), 48000, [])
    assert np.abs(output[1000:-1000]).max() <= HQ_ERROR


def test_equal_rates_pass_samples_untouched_and_at_once() -> None:
    samples = tone(440.0, 16000)
    resampler = StreamingResampler(16000, 16000)
    assert resampler.accept(samples) is samples
    assert resampler.finish().size == 0


def test_a_stream_without_samples_gives_none() -> None:
    for rate in (8000, 16000, 48000):
        assert StreamingResampler(rate, 16000).finish().size == 0


@pytest.mark.parametrize("rate", [0, -16000, 7999, 48001])
def test_a_rate_outside_the_limits_is_refused_by_name(rate: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{rate} Hz is outside 8000\.\.48000"):
        StreamingResampler(rate, 16000)


@pytest.mark.parametrize("rate", [8000, 16000])
def test_samples_after_the_end_are_refused(rate: int) -> None:
    resampler = StreamingResampler(rate, 16000)
    resampler.finish()
    with pytest.raises(StreamStateError, match="after the end"):
        resampler.accept(tone(440.0, rate))
    with pytest.raises(StreamStateError):
        resampler.finish()


def test_samples_of_another_type_are_refused() -> None:
    with pytest.raises(StreamStateError, match="float64"):
        StreamingResampler(8000, 16000).accept(np.zeros(10))


@pytest.mark.parametrize(("decode", "subtype"), [(decode_mulaw, "ULAW"), (decode_alaw, "ALAW")])
def test_every_code_decodes_as_libsndfile_does(decode: object, subtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected, _ = soundfile.read(
        io.BytesIO(codes.tobytes()),
        format="RAW",
        subtype=subtype,
        channels=1,
        samplerate=8000,
        dtype="float32",
    )
    assert callable(decode)
    decoded = decode(codes)
    assert decoded.dtype == np.float32
    assert np.array_equal(decoded, expected)


def test_known_values_of_g711() -> None:
    mulaw = decode_mulaw(np.array([0x00, 0x80, 0xFF, 0x7F], np.uint8))
    assert (mulaw * 8192).tolist() == [-8031, 8031, 0, 0]
    alaw = decode_alaw(np.array([0xAA, 0x2A, 0xD5, 0x55], np.uint8))
    assert (alaw * 4096).tolist() == [4032, -4032, 1, -1]


def test_decoding_gives_the_caller_an_array_of_its_own() -> None:
    decoded = decode_mulaw(np.zeros(4, np.uint8))
    decoded[:] = 0.0
    assert decode_mulaw(np.zeros(1, np.uint8))[0] != 0.0


def test_pcm16_is_resampled_as_the_float32_it_stands_for() -> None:
    pcm16 = np.random.default_rng(0).integers(-32768, 32768, 8000).astype(np.int16)
    as_pcm16, as_float32 = StreamingResampler(8000, 16000), StreamingResampler(8000, 16000)
    expected = as_float32.accept(pcm16.astype(np.float32) / np.float32(32768))
    assert np.array_equal(as_pcm16.accept(pcm16), expected)
    assert np.array_equal(as_pcm16.finish(), as_float32.finish())
