"""Streams of samples and the windows that a buffer cuts of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from oasr_backend.features import AudioBuffer, WindowGeometry
from tests.reference.windows import Samples, Window


def noise(num_samples: int, seed: int = 0) -> Samples:
    return np.random.default_rng(seed).standard_normal(num_samples).astype(np.float32)


def codes(num_samples: int, seed: int = 0) -> npt.NDArray[np.int16]:
    return np.random.default_rng(seed).integers(-32768, 32768, num_samples).astype(np.int16)


def pop_ready(buffer: AudioBuffer) -> list[Window]:
    windows = []
    for _ in range(buffer.num_ready_windows):
        row = np.full(buffer.geometry.window_samples, np.nan, dtype=np.float32)
        windows.append((row, buffer.pop_window(row)))
        buffer.check_integrity()
    assert buffer.num_ready_windows == 0
    return windows


def cut(
    geometry: WindowGeometry,
    pieces: Iterable[npt.NDArray[np.float32] | npt.NDArray[np.int16]],
    *,
    tail_padding: bool,
    check_every: int = 1,
) -> list[Window]:
    """All windows of a stream whose samples arrive in these pieces."""
    buffer, windows, num_heard = AudioBuffer(geometry), [], 0
    for number, piece in enumerate(pieces):
        buffer.accept(piece)
        num_heard += piece.size
        if number % check_every == 0:
            buffer.check_integrity()
        windows += pop_ready(buffer)
    buffer.finish(tail_padding=tail_padding)
    buffer.check_integrity()
    windows += pop_ready(buffer)
    assert buffer.heard_samples == num_heard
    return windows


def assert_same(left: list[Window], right: list[Window]) -> None:
    assert [frames for _, frames in left] == [frames for _, frames in right]
    for (left_row, _), (right_row, _) in zip(left, right, strict=True):
        assert left_row.tobytes() == right_row.tobytes()
