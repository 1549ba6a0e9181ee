"""Windows depend on the samples only, never on how they arrive."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.errors import ConfigError, StreamStateError
from oasr_backend.features import AudioBuffer, FrameGeometry, WindowFrames, WindowGeometry
from tests.audio_helpers import assert_same, codes, cut, noise, pop_ready
from tests.reference.windows import obvious_windows

SMALL = WindowGeometry(
    FrameGeometry(16000, frame_length_samples=5, frame_shift_samples=2, num_bins=3),
    window_frames=9,
    stride_frames=8,
    min_frames=3,
    subsampling=2,
)
USUAL_FRAMES = FrameGeometry(16000, frame_length_samples=400, frame_shift_samples=160, num_bins=80)
USUAL = WindowGeometry.of(USUAL_FRAMES, chunk_frames=16, subsampling=4, right_context_frames=6)


@settings(max_examples=200)
@given(
    num_samples=st.integers(0, 120),
    sizes=st.lists(st.integers(0, 40), max_size=8),
    tail_padding=st.booleans(),
)
def test_any_cutting_gives_the_windows_of_the_obvious_rule(
    num_samples: int, sizes: list[int], tail_padding: bool
) -> None:
    samples = noise(num_samples)
    expected = obvious_windows(SMALL, samples, tail_padding=tail_padding)
    pieces = np.split(samples, np.cumsum(sizes))
    assert_same(cut(SMALL, pieces, tail_padding=tail_padding), expected)


@settings(max_examples=200)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=8),
    tail_padding=st.booleans(),
)
def test_pcm16_and_float32_pieces_of_one_signal_give_the_same_windows(
    pieces: list[tuple[int, bool]], tail_padding: bool
) -> None:
    ends = np.cumsum([size for size, _ in pieces], dtype=np.int64)
    pcm16 = codes(int(ends[-1]) if pieces else 0)
    signal = pcm16.astype(np.float32) / np.float32(32768)
    mixed = [
        (pcm16 if is_pcm16 else signal)[end - size : end]
        for end, (size, is_pcm16) in zip(ends, pieces, strict=True)
    ]
    windows = cut(SMALL, mixed, tail_padding=tail_padding)
    assert_same(windows, cut(SMALL, [signal], tail_padding=tail_padding))


def test_an_empty_piece_does_not_change_the_type_that_is_held() -> None:
    buffer = AudioBuffer(SMALL)
    buffer.accept(np.ones(20, np.int16))
    buffer.accept(np.empty(0, np.float32))
    assert buffer.holds_pcm16
    buffer.check_integrity()


def test_a_stream_holds_pcm16_again_once_its_floats_are_passed() -> None:
    buffer = AudioBuffer(SMALL)
    buffer.accept(noise(SMALL.stride_samples))
    buffer.accept(np.ones(SMALL.window_samples, np.int16))
    assert not buffer.holds_pcm16
    buffer.pop_window(np.empty(SMALL.window_samples, np.float32))
    assert buffer.holds_pcm16
    buffer.check_integrity()


@pytest.mark.parametrize("tail_padding", [False, True])
def test_sixty_seconds_at_once_equal_pieces_and_single_samples(tail_padding: bool) -> None:
    samples = noise(60 * 16000)
    whole = cut(USUAL, [samples], tail_padding=tail_padding)
    assert_same(whole, obvious_windows(USUAL, samples, tail_padding=tail_padding))
    assert_same(whole, cut(USUAL, samples.reshape(-1, 1600), tail_padding=tail_padding))
    single = samples[:40000]
    assert_same(
        cut(USUAL, single.reshape(-1, 1), tail_padding=tail_padding, check_every=100),
        cut(USUAL, [single], tail_padding=tail_padding),
    )


def test_the_usual_window_is_that_of_wenet() -> None:
    assert (USUAL.window_frames, USUAL.stride_frames, USUAL.min_frames) == (67, 64, 7)
    assert (USUAL.window_samples, USUAL.stride_samples) == (10960, 10240)


def test_encoder_frames_follow_two_convolutions_of_stride_two() -> None:
    for num_frames in range(7, 200):
        expected = ((num_frames - 1) // 2 - 1) // 2
        assert USUAL.num_encoder_frames(num_frames) == expected
    assert USUAL.num_encoder_frames(6) == 0


def test_a_stream_without_samples_has_no_windows() -> None:
    for tail_padding in (False, True):
        assert cut(USUAL, [noise(0)], tail_padding=tail_padding) == []


def test_one_sample_is_heard_with_tail_padding_only() -> None:
    assert cut(USUAL, [noise(1)], tail_padding=False) == []
    [(row, frames)] = cut(USUAL, [noise(1)], tail_padding=True)
    assert frames == WindowFrames(num_valid=67, num_real=67)
    assert row[0] == noise(1)[0]
    assert not row[1:].any()


@settings(max_examples=100)
@given(num_samples=st.integers(1, 200))
def test_tail_padding_lets_a_full_window_end_after_the_last_sample(num_samples: int) -> None:
    samples = noise(num_samples)
    windows = cut(SMALL, [samples], tail_padding=True)
    assert all(frames.num_valid == SMALL.window_frames for _, frames in windows)
    last_start = (len(windows) - 1) * SMALL.stride_samples
    assert last_start <= num_samples < last_start + SMALL.stride_samples


def test_released_samples_do_not_pile_up() -> None:
    buffer = AudioBuffer(SMALL)
    for seed in range(300):
        buffer.accept(noise(7, seed))
        pop_ready(buffer)
        assert buffer.buffered_samples < SMALL.window_samples
        assert sum(piece.size for piece in buffer._held.pieces) < SMALL.window_samples + 7


def test_a_burst_is_given_back_after_it_was_read() -> None:
    buffer = AudioBuffer(SMALL)
    burst = noise(100_000)
    held = weakref.ref(burst)
    buffer.accept(burst)
    del burst
    pop_ready(buffer)
    buffer.accept(noise(2 * SMALL.window_samples))
    pop_ready(buffer)
    assert held() is None


def test_samples_are_kept_where_they_are_until_their_window_is_cut() -> None:
    buffer = AudioBuffer(SMALL)
    samples = noise(SMALL.window_samples)
    buffer.accept(samples)
    assert np.shares_memory(buffer._held.pieces[0], samples)
    [(row, _)] = pop_ready(buffer)
    assert np.array_equal(row, samples)
    assert not np.shares_memory(row, samples)


def test_a_window_of_pcm16_is_given_as_either_type() -> None:
    codes = (noise(3 * SMALL.window_samples) * 30_000).astype(np.int16)
    as_they_are, scaled = AudioBuffer(SMALL), AudioBuffer(SMALL)
    for buffer in (as_they_are, scaled):
        buffer.accept(codes)
        buffer.finish(tail_padding=False)
    assert as_they_are.holds_pcm16
    while scaled.num_ready_windows:
        code_row = np.full(SMALL.window_samples, 77, np.int16)
        row = np.full(SMALL.window_samples, 77, np.float32)
        assert as_they_are.pop_window(code_row) == scaled.pop_window(row)
        assert np.array_equal(code_row / np.float32(32768), row)
    assert as_they_are.num_ready_windows == 0


def test_float_samples_do_not_go_into_a_row_of_pcm16() -> None:
    buffer = AudioBuffer(SMALL)
    buffer.accept(noise(SMALL.window_samples))
    assert not buffer.holds_pcm16
    with pytest.raises(StreamStateError, match="int16"):
        buffer.pop_window(np.zeros(SMALL.window_samples, np.int16))
    assert buffer.num_ready_windows == 1


def test_misuse_is_refused_and_changes_nothing() -> None:
    buffer = AudioBuffer(SMALL)
    row = np.zeros(SMALL.window_samples, np.float32)
    with pytest.raises(StreamStateError, match="no window is ready"):
        buffer.pop_window(row)
    with pytest.raises(StreamStateError, match="float64"):
        buffer.accept(np.zeros(3))
    with pytest.raises(StreamStateError, match="shape"):
        buffer.accept(np.zeros((1, 3), np.float32))
    buffer.accept(noise(SMALL.window_samples))
    with pytest.raises(StreamStateError, match="window row"):
        buffer.pop_window(row[:-1])
    assert buffer.num_ready_windows == 1
    buffer.finish(tail_padding=False)
    with pytest.raises(StreamStateError, match="after the end"):
        buffer.accept(noise(1))
    with pytest.raises(StreamStateError, match="already ended"):
        buffer.finish(tail_padding=True)
    assert buffer.is_finished
    assert len(pop_ready(buffer)) == 1


@pytest.mark.parametrize("finished", [False, True])
def test_a_discarded_stream_has_no_window_and_takes_no_sample(finished: bool) -> None:
    buffer = AudioBuffer(SMALL)
    buffer.accept(noise(5 * SMALL.window_samples))
    buffer.pop_window(np.zeros(SMALL.window_samples, np.float32))
    if finished:
        buffer.finish(tail_padding=True)
    for _ in range(2):
        buffer.discard()
        buffer.check_integrity()
    assert buffer.is_finished
    assert (buffer.num_ready_windows, buffer.buffered_samples) == (0, 0)
    assert buffer.heard_samples == 5 * SMALL.window_samples
    with pytest.raises(StreamStateError, match="after the end"):
        buffer.accept(noise(1))


def test_integrity_notices_a_lost_sample() -> None:
    buffer = AudioBuffer(SMALL)
    buffer.accept(noise(4))
    buffer._heard_samples += 1
    with pytest.raises(StreamStateError, match="4 samples are held, but 5 were heard"):
        buffer.check_integrity()


def test_integrity_notices_samples_that_are_not_counted() -> None:
    buffer = AudioBuffer(SMALL)
    buffer.accept(noise(4))
    buffer._held.pieces.append(noise(2))
    with pytest.raises(StreamStateError, match="6 samples in 2 arrays, 2 of them float32"):
        buffer.check_integrity()


@pytest.mark.parametrize(
    "changes",
    [
        {"stride_frames": 68},
        {"stride_frames": 0},
        {"stride_frames": 62},
        {"min_frames": 70},
        {"min_frames": 0},
        {"subsampling": 0},
    ],
)
def test_a_window_that_loses_frames_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(USUAL, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"frame_length_samples": 100},
        {"frame_shift_samples": 0},
        {"sample_rate": 0},
        {"num_bins": 0},
        {"frame_length_samples": 401, "snips_edges": False},
    ],
)
def test_a_frame_that_loses_samples_or_holds_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(USUAL_FRAMES, **changes)
