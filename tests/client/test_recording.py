"""Files in blocks: what is read, what is warned of, what is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from oasr_client.audio import iter_audio, iter_chunks, read_audio, rechunked, to_mono_16k
from oasr_client.downmix import Downmix
from oasr_client.errors import InvalidAudioError
from oasr_client.recording import Recording
from oasr_client.sources import AudioSource, Excerpt

RATE_HZ = 16000


def noise(num_frames: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.5, 0.5, num_frames).astype(np.float32)


def read(source: AudioSource) -> tuple[np.ndarray, list[str]]:
    with Recording(source) as recording:
        blocks = [*recording.blocks(), np.empty(0, np.float32)]
    return np.concatenate(blocks), recording.warnings


@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_24"),
    ],
)
def test_blocks_are_the_file_as_one_piece(tmp_path: Path, form: str, subtype: str) -> None:
    path = tmp_path / "a"
    stereo = np.stack([noise(150_000), noise(150_000, seed=1)], axis=1)
    soundfile.write(path, stereo, 48000, format=form, subtype=subtype)
    whole, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    expected = soxr.resample(whole.mean(axis=1), rate_hz, RATE_HZ, quality="HQ")
    heard, warnings = read(path)
    assert heard.size == expected.size
    np.testing.assert_allclose(heard, expected, atol=1e-5)
    assert warnings == []
    with Recording(path) as recording:
        assert recording.num_samples == expected.size


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 700), max_size=8),
    st.sampled_from([1, 100, 160, 1000, 100_000]),
)
def test_blocks_are_cut_into_chunks_as_the_whole_is(sizes: list[int], num_samples: int) -> None:
    chunk_ms = num_samples / 16
    whole = np.arange(sum(sizes), dtype=np.float32)
    blocks = np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []
    cut = list(rechunked(blocks, chunk_ms))
    expected = list(iter_chunks(whole, chunk_ms))
    assert [chunk.tolist() for chunk in cut] == [chunk.tolist() for chunk in expected]


def test_a_long_file_is_had_in_chunks(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(40_000), RATE_HZ, subtype="FLOAT")
    chunks = list(iter_audio(tmp_path / "a.wav", 640))
    assert [chunk.size for chunk in chunks] == [10240, 10240, 10240, 9280]
    np.testing.assert_array_equal(np.concatenate(chunks), noise(40_000))


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3"])
@pytest.mark.parametrize(
    ("offset_s", "duration_s"), [(0.0, 1.0), (0.5, 1.25), (2.0, None), (2.9, 0.1)]
)
def test_an_excerpt_is_that_part_of_the_file(
    tmp_path: Path, suffix: str, offset_s: float, duration_s: float | None
) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, noise(3 * RATE_HZ), RATE_HZ)
    whole = read_audio(path)
    begin = round(offset_s * RATE_HZ)
    end = whole.size if duration_s is None else begin + round(duration_s * RATE_HZ)
    excerpt = Excerpt(path, offset_s, duration_s)
    heard, warnings = read(excerpt)
    # An MP3 decoder that has jumped rounds other sums.
    np.testing.assert_allclose(heard, whole[begin:end], atol=1e-6)
    assert warnings == []
    with Recording(excerpt) as recording:
        assert recording.num_samples == end - begin


def test_an_excerpt_behind_the_end_is_refused_and_a_short_one_told(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, noise(RATE_HZ), RATE_HZ)
    with pytest.raises(InvalidAudioError, match="ends at 1 s; correct the offset of 3 s"):
        read(Excerpt(path, 3.0, 1.0))
    heard, warnings = read(Excerpt(path, 0.5, 2.0))
    assert heard.size == RATE_HZ / 2
    assert warnings == ["ends 0.5 s behind the offset, not 2 s; check the manifest"]
    assert read(Excerpt(path, 0.0, 1.05))[1] == []


@pytest.mark.parametrize(
    "channels",
    [[1.0, -1.0], [1.0, -0.95], [-0.9, 1.0], [0.0, 1.0, -1.0], [1.0, -1.0, 1.0, -1.0]],
)
@pytest.mark.parametrize("rate_hz", [16000, 48000])
def test_channels_that_cancel_are_heard_with_a_warning(
    tmp_path: Path, channels: list[float], rate_hz: int
) -> None:
    voice = noise(3 * rate_hz)
    path = tmp_path / "a.wav"
    soundfile.write(path, voice[:, None] * np.array(channels), rate_hz, subtype="FLOAT")
    heard, (warning,) = read(path)
    alone = soxr.resample(voice, rate_hz, RATE_HZ, quality="HQ")
    assert np.square(heard).mean() == pytest.approx(np.square(alone).mean(), rel=0.25)
    assert "channels cancel each other" in warning
    with pytest.warns(UserWarning, match=r"a\.wav: its channels cancel"):
        np.testing.assert_array_equal(read_audio(path), heard)
    whole = to_mono_16k(voice[:, None] * np.array(channels, np.float32), rate_hz)
    assert np.square(whole).mean() == pytest.approx(np.square(alone).mean(), rel=0.25)


@pytest.mark.parametrize(
    "channels", [[1.0, 1.0], [1.0, 0.0], [1.0, -0.5], [0.0, 0.0], [1.0] + [0.0] * 7]
)
def test_channels_that_do_not_cancel_are_averaged(tmp_path: Path, channels: list[float]) -> None:
    voice = noise(2 * RATE_HZ)
    path = tmp_path / "a.wav"
    soundfile.write(path, voice[:, None] * np.array(channels), RATE_HZ, subtype="FLOAT")
    heard, warnings = read(path)
    np.testing.assert_allclose(heard, voice * np.mean(channels), atol=1e-6)
    assert warnings == []


@pytest.mark.parametrize(
    ("begin", "end"),
    [(2 * RATE_HZ, 4 * RATE_HZ), (34_567, 4 * RATE_HZ), (0, 34_567), (20_001, 22_003)],
)
def test_channels_that_cancel_in_a_part_only_are_heard_there(
    tmp_path: Path, begin: int, end: int
) -> None:
    voice = noise(4 * RATE_HZ)
    other = voice.copy()
    other[begin:end] *= -1
    soundfile.write(tmp_path / "a.wav", np.stack([voice, other], 1), RATE_HZ, subtype="FLOAT")
    heard, warnings = read(tmp_path / "a.wav")
    # Of the same power before and behind the change: nothing is left out, nothing clicks.
    np.testing.assert_allclose(heard, voice, atol=1e-6)
    assert len(warnings) == 1


def test_one_channel_fades_into_the_mean() -> None:
    """Unlike levels: a step of the size of the tone's own steps is no click."""
    tone = 0.5 * np.sin(2 * np.pi * 100 * np.arange(2 * RATE_HZ) / RATE_HZ).astype(np.float32)
    other = np.where(np.arange(tone.size) < RATE_HZ, -tone, 0).astype(np.float32)
    heard = to_mono_16k(np.stack([tone, other], axis=1), RATE_HZ)
    np.testing.assert_array_equal(heard[:RATE_HZ], tone[:RATE_HZ])
    np.testing.assert_allclose(heard[RATE_HZ + 1600 :], tone[RATE_HZ + 1600 :] / 2, atol=1e-6)
    assert np.abs(np.diff(heard)).max() <= 1.1 * np.abs(np.diff(tone)).max()


def test_channels_that_cancel_by_chance_are_not_told_of(tmp_path: Path) -> None:
    left = noise(2 * RATE_HZ)
    right = noise(2 * RATE_HZ, seed=1)
    right[16_000:16_640] = -left[16_000:16_640]
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], 1), RATE_HZ, subtype="FLOAT")
    heard, warnings = read(tmp_path / "a.wav")
    np.testing.assert_allclose(heard[16_000:16_640], left[16_000:16_640], atol=1e-6)
    np.testing.assert_allclose(heard[18_000:], (left + right)[18_000:] / 2, atol=1e-6)
    assert warnings == []


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 1500), max_size=12),
    st.lists(st.tuples(st.integers(1, 1500), st.sampled_from([1, -1, -0.95, 0])), min_size=1),
    st.sampled_from([4000, 16000]),
)
def test_channels_are_mixed_alike_in_any_blocks(
    sizes: list[int], spans: list[tuple[int, float]], rate_hz: int
) -> None:
    factors = np.repeat([factor for _, factor in spans], [size for size, _ in spans])
    voice = noise(factors.size)
    stereo = np.stack([voice, voice * factors], axis=1, dtype=np.float32)
    whole, parts = Downmix(rate_hz), Downmix(rate_hz)
    expected = np.concatenate([whole.mix(stereo), whole.finish()])
    blocks = np.split(stereo, np.minimum(np.cumsum(sizes, dtype=int), len(stereo)))
    heard = np.concatenate([*map(parts.mix, blocks), parts.finish()])
    assert heard.size == voice.size
    np.testing.assert_array_equal(heard, expected)
    assert parts.has_cancelled == whole.has_cancelled


def with_sizes(path: Path, *, data_size: int, riff_size: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 4, riff_size)
    struct.pack_into("<I", content, content.find(b"data") + 4, data_size)
    path.write_bytes(content)


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "ULAW"])
@pytest.mark.parametrize("riff_size", [0, 36, 0xFFFFFFFF])
@pytest.mark.parametrize("data_size", [0, 0xFFFFFFFF])
def test_a_wav_that_denies_its_samples_is_read_to_its_end(
    tmp_path: Path, subtype: str, riff_size: int, data_size: int
) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, noise(100_000), RATE_HZ, subtype=subtype)
    expected = read_audio(path)
    with_sizes(path, data_size=data_size, riff_size=riff_size)
    heard, warnings = read(path)
    np.testing.assert_array_equal(heard, expected)
    denies = ["its header says 0 samples; it is read up to its end"]
    assert warnings == (denies if data_size == 0 else [])


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "ULAW"])
def test_a_wav_that_says_more_than_it_holds_is_told(tmp_path: Path, subtype: str) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, noise(100_000), RATE_HZ, subtype=subtype)
    content = path.read_bytes()
    assert read(path)[1] == []
    num_cut = 60_000
    path.write_bytes(content[:-num_cut])
    heard, warnings = read(path)
    assert 0 < heard.size < 100_000
    assert warnings == [
        "its header says 60000 bytes more than the file has; check that the copy is complete"
    ]


def test_an_empty_wav_with_notes_behind_its_data_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.zeros(0), RATE_HZ)
    note = b"LIST" + struct.pack("<I", 5000) + b"INFO" + bytes(4996)
    path.write_bytes(path.read_bytes() + note)
    with pytest.raises(InvalidAudioError, match="the header says 0 samples, and the file has 50"):
        read(path)
    note = b"LIST" + struct.pack("<I", 50) + b"INFO" + bytes(46)
    soundfile.write(path, np.zeros(0), RATE_HZ)
    path.write_bytes(path.read_bytes() + note)
    assert read(path)[0].size == 0


def test_other_files_that_deny_their_samples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.au"
    soundfile.write(path, noise(100_000), RATE_HZ, subtype="PCM_16")
    content = bytearray(path.read_bytes())
    struct.pack_into(">I", content, 8, 0)
    path.write_bytes(content)
    with pytest.raises(InvalidAudioError, match=f"^{path}: the header says 0 samples, and the fi"):
        read(path)


def test_a_flac_of_unknown_length_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, noise(100_000), RATE_HZ)
    expected = read_audio(path)
    content = bytearray(path.read_bytes())
    # The 36 bits of STREAMINFO's number of samples, as an encoder into a pipe leaves them.
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    path.write_bytes(content)
    heard, _ = read(path)
    np.testing.assert_array_equal(heard, expected)
    with Recording(path) as recording:
        assert recording.num_samples is None


def test_excerpts_of_one_file_have_names_of_their_own() -> None:
    path = Path("a.wav")
    excerpts = [Excerpt(path, 0.0, 1.0), Excerpt(path, 0.0, 2.0), Excerpt(path)]
    excerpts += [Excerpt(path, 1000.001, 1.0), Excerpt(path, 1000.002, 0.999)]
    assert [str(source) for source in excerpts] == [
        "a.wav from 0 s to 1 s",
        "a.wav from 0 s to 2 s",
        "a.wav from 0 s",
        "a.wav from 1000.001 s to 1001.001 s",
        "a.wav from 1000.002 s to 1001.001 s",
    ]
