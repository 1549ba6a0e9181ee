"""Mirrored edges and a family's own padding give the windows of the rule in words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.errors import ConfigError
from oasr_backend.features import AudioBuffer, FrameGeometry, WindowFrames, WindowGeometry
from tests.audio_helpers import assert_same, codes, cut, noise, pop_ready
from tests.reference.windows import mirrored, obvious_windows

FRAMES = FrameGeometry(
    16000, frame_length_samples=400, frame_shift_samples=160, num_bins=80, snips_edges=False
)
ICEFALL = WindowGeometry.of(
    FRAMES, chunk_frames=8, subsampling=4, right_context_frames=16, tail_frames=43
)


@st.composite
def geometries(draw: st.DrawFn) -> WindowGeometry:
    """Frames of an even length, whose lead and tail may be many times a short stream."""
    length = 2 * draw(st.integers(1, 12))
    frames = FrameGeometry(
        16000,
        frame_length_samples=length,
        frame_shift_samples=draw(st.integers(1, length)),
        num_bins=3,
        snips_edges=draw(st.booleans()),
    )
    subsampling, min_frames = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    stride = subsampling * draw(st.integers(1, 4))
    return WindowGeometry(
        frames,
        window_frames=max(min_frames, stride) + draw(st.integers(0, 4)),
        stride_frames=stride,
        min_frames=min_frames,
        subsampling=subsampling,
        tail_frames=draw(st.none() | st.integers(0, 20)),
    )


@settings(max_examples=500)
@given(
    geometry=geometries(),
    pieces=st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=6),
    tail_padding=st.booleans(),
)
def test_any_cutting_of_any_geometry_gives_the_windows_of_the_obvious_rule(
    geometry: WindowGeometry, pieces: list[tuple[int, bool]], tail_padding: bool
) -> None:
    pcm16_S = codes(sum(size for size, _ in pieces))
    signal_S = pcm16_S.astype(np.float32) / np.float32(32768)
    mixed: list[npt.NDArray[np.float32] | npt.NDArray[np.int16]] = []
    begin = 0
    for size, is_pcm16 in pieces:
        mixed.append((pcm16_S if is_pcm16 else signal_S)[begin : begin + size])
        begin += size
    expected = obvious_windows(geometry, signal_S, tail_padding=tail_padding)
    assert_same(cut(geometry, mixed, tail_padding=tail_padding), expected)


@pytest.mark.parametrize("tail_padding", [False, True])
def test_every_length_to_two_thousand_samples_gives_those_windows(tail_padding: bool) -> None:
    signal_S = noise(2000)
    # Short windows, so that these lengths have many, without padding too.
    geometry = WindowGeometry.of(
        FRAMES, chunk_frames=1, subsampling=4, right_context_frames=4, tail_frames=43
    )
    for num_samples in range(2001):
        samples_S = signal_S[:num_samples]
        expected = obvious_windows(geometry, samples_S, tail_padding=tail_padding)
        assert_same(cut(geometry, [samples_S], tail_padding=tail_padding), expected)


def test_the_first_samples_are_mirrored_in_front() -> None:
    """And the first window is ready 120 samples sooner than it has samples."""
    samples_S = noise(7320)
    buffer = AudioBuffer(ICEFALL)
    for piece_S in np.array_split(samples_S[:-1], 90):
        buffer.accept(piece_S)
    assert buffer.num_ready_windows == 0
    buffer.accept(samples_S[-1:])
    [(row_S, frames)] = pop_ready(buffer)
    assert frames == WindowFrames(45, 45)
    assert np.array_equal(row_S[:120], samples_S[119::-1])
    assert np.array_equal(row_S[120:], samples_S)
    assert buffer.heard_samples == 7320


def test_a_second_has_one_frame_more_once_its_end_is_known() -> None:
    assert FRAMES.lead_samples == 120
    assert FRAMES.num_frames(120 + 16000) == 99
    assert FRAMES.num_stream_frames(16000) == 100


@pytest.mark.parametrize(("num_samples", "num_frames"), [(0, 0), (79, 0), (80, 1), (239, 1)])
def test_half_a_shift_is_the_least_that_gives_a_frame(num_samples: int, num_frames: int) -> None:
    windows = cut(ICEFALL, [noise(num_samples)], tail_padding=True)
    assert sum(frames.num_real for _, frames in windows) == num_frames
    assert len(windows) == (2 if num_frames else 0)
    for row_S, frames in windows[:1]:
        assert frames == WindowFrames(num_valid=45, num_real=1)
        assert np.array_equal(row_S[:400], mirrored(noise(num_samples), -120, 280))
        assert not row_S[400:].any()


@pytest.mark.parametrize("num_samples", [80, 100, 5000, 40000])
@pytest.mark.parametrize("tail_padding", [False, True])
def test_mirrored_samples_of_16_bits_stay_that(num_samples: int, tail_padding: bool) -> None:
    pcm16_S = codes(num_samples)
    buffer = AudioBuffer(ICEFALL)
    rows: list[tuple[npt.NDArray[np.float32], WindowFrames]] = []

    def pop_all() -> None:
        while buffer.num_ready_windows:
            assert buffer.holds_pcm16
            row_S = np.full(ICEFALL.window_samples, 77, np.int16)
            frames = buffer.pop_window(row_S)
            buffer.check_integrity()
            rows.append((row_S / np.float32(32768), frames))

    for piece_S in np.array_split(pcm16_S, 7):
        buffer.accept(piece_S)
        pop_all()
    buffer.finish(tail_padding=tail_padding)
    pop_all()
    signal_S = pcm16_S / np.float32(32768)
    assert_same(rows, cut(ICEFALL, [signal_S], tail_padding=tail_padding))


@pytest.mark.parametrize("chunk", [8, 16, 32, 64])
@pytest.mark.parametrize("num_samples", [80, 16000, 16000 * 3 + 77, 16000 * 5])
def test_a_stream_ends_in_whole_windows_that_cover_the_tail(chunk: int, num_samples: int) -> None:
    """The last word is heard under any chunk: T real frames and 43 more are in windows."""
    geometry = WindowGeometry.of(
        FRAMES, chunk_frames=chunk // 2, subsampling=4, right_context_frames=16, tail_frames=43
    )
    assert (geometry.window_frames, geometry.stride_frames) == (2 * chunk + 13, 2 * chunk)
    num_frames = (num_samples + 80) // 160
    windows = cut(geometry, [noise(num_samples)], tail_padding=True)
    assert len(windows) == -(-(num_frames + 43) // (2 * chunk))
    for number, (row_S, frames) in enumerate(windows):
        left = max(0, num_frames - number * 2 * chunk)
        assert frames == WindowFrames(2 * chunk + 13, min(2 * chunk + 13, left))
        num_heard = 400 + (frames.num_real - 1) * 160 if frames.num_real else 0
        assert not row_S[num_heard:].any()


@pytest.mark.parametrize("finished", [False, True])
def test_a_discarded_stream_with_mirrored_edges_is_whole(finished: bool) -> None:
    buffer = AudioBuffer(ICEFALL)
    buffer.accept(noise(9000))
    buffer.pop_window(np.zeros(ICEFALL.window_samples, np.float32))
    if finished:
        buffer.finish(tail_padding=True)
    buffer.discard()
    buffer.check_integrity()
    assert (buffer.num_ready_windows, buffer.buffered_samples) == (0, 0)
    assert buffer.heard_samples == 9000


def test_mirrored_frames_without_a_middle_are_refused_with_their_length() -> None:
    with pytest.raises(ConfigError, match=r"frame of 275 samples has no middle.*even"):
        FrameGeometry(
            11025, frame_length_samples=275, frame_shift_samples=110, num_bins=80, snips_edges=False
        )
