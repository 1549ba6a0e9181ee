"""The windows of a stream by their rule in words, frame by frame."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oasr_backend.features import FrameGeometry, WindowFrames, WindowGeometry

Samples = npt.NDArray[np.float32]
#: Its samples, and how many of its frames are valid and real.
Window = tuple[Samples, WindowFrames]


def mirrored(samples_S: Samples, begin: int, end: int) -> Samples:
    """Samples `begin` .. `end` of a stream that goes on beyond its ends by mirroring."""
    found, num_samples = [], samples_S.size
    for place in range(begin, end):
        while not 0 <= place < num_samples:
            place = -1 - place if place < 0 else 2 * num_samples - 1 - place
        found.append(samples_S[place])
    return np.array(found, np.float32)


def obvious_frames(frames: FrameGeometry, samples_S: Samples) -> list[Samples]:
    """The samples under each frame of a whole stream.

    Frames that do not snip the edges are as many as shifts fit into the stream, rounded, and lie
    around the middle of each.
    """
    length, shift = frames.frame_length_samples, frames.frame_shift_samples
    if frames.snips_edges:
        begins = range(0, samples_S.size - length + 1, shift)
    else:
        first = shift // 2 - length // 2
        begins = range(first, first + (samples_S.size + shift // 2) // shift * shift, shift)
    return [
        samples_S[begin : begin + length]
        if begin >= 0 and begin + length <= samples_S.size
        else mirrored(samples_S, begin, begin + length)
        for begin in begins
    ]


def obvious_windows(
    geometry: WindowGeometry, samples_S: Samples, *, tail_padding: bool
) -> list[Window]:
    """Pad or not, then walk over feature frames as the toolkit's loop does."""
    if tail_padding and geometry.tail_frames is None:
        return _windows_into_silence(geometry, samples_S)
    frames = obvious_frames(geometry.frames, samples_S)
    total, shortest = len(frames), geometry.min_frames
    if tail_padding and frames:
        total, shortest = total + int(geometry.tail_frames or 0), 1
    windows = []
    for first in range(0, total - shortest + 1, geometry.stride_frames):
        real = frames[first : first + geometry.window_frames]
        num_valid = geometry.window_frames if tail_padding else len(real)
        windows.append((_row(geometry, real), WindowFrames(num_valid, len(real))))
    return windows


def _windows_into_silence(geometry: WindowGeometry, samples_S: Samples) -> list[Window]:
    """As long as a whole window begins at the last sample or before it."""
    if not samples_S.size:
        return []
    lead_S = mirrored(samples_S, -geometry.frames.lead_samples, 0)
    silence_S = np.zeros(geometry.window_samples, np.float32)
    heard_S = np.concatenate([lead_S, samples_S, silence_S])
    num_samples, stride = geometry.window_samples, geometry.stride_samples
    return [
        (heard_S[begin : begin + num_samples], WindowFrames(*[geometry.window_frames] * 2))
        for begin in range(0, heard_S.size - num_samples + 1, stride)
    ]


def _row(geometry: WindowGeometry, frames: list[Samples]) -> Samples:
    row_S = np.zeros(geometry.window_samples, np.float32)
    for number, frame_S in enumerate(frames):
        begin = number * geometry.frames.frame_shift_samples
        row_S[begin : begin + frame_S.size] = frame_S
    return row_S
