"""The samples of one stream on their way into encoder windows of fixed size.

    samples  |--------------------- window_samples ---------------------|
             |---------------- stride_samples -----------------|
                                                               |-- next window ...

Consecutive windows overlap by the encoder's right context, so nothing is carried over but samples.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from oasr_backend.errors import StreamStateError
from oasr_backend.features.geometry import WindowGeometry
from oasr_backend.features.samples import FLOAT32, PCM16, PCM16_SCALE, check_samples
from oasr_backend.types import Pcm16, Samples


class WindowFrames(NamedTuple):
    """Feature frames of one window: `num_valid` are heard, the first `num_real` hold samples."""

    num_valid: int
    num_real: int


class AudioBuffer:
    """Cuts one stream into windows; the result doesn't depend on how the samples arrive.

    Samples are moved once, from the array that they came in to the window's row. `_pieces` are
    those arrays, as far as a later window needs them; `_passed` samples of the first are done with.
    """

    def __init__(self, geometry: WindowGeometry) -> None:
        self.geometry = geometry
        self._pieces: deque[Samples | Pcm16] = deque()
        self._passed = 0
        self._num_float_pieces = 0
        self._buffered_samples = 0
        self._heard_samples = 0
        self._popped_windows = 0
        #: Windows that `pop_window` can give now. After `finish`, all that will ever come.
        self.num_ready_windows = 0
        self._is_finished = False
        self._has_tail_padding = False
        self._is_discarded = False

    @property
    def heard_samples(self) -> int:
        """Samples accepted since the stream began; padding doesn't count."""
        return self._heard_samples

    @property
    def buffered_samples(self) -> int:
        return self._buffered_samples

    @property
    def popped_windows(self) -> int:
        return self._popped_windows

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def holds_pcm16(self) -> bool:
        """Whether the next window can be had as 16-bit samples."""
        return self._num_float_pieces == 0

    def accept(self, samples_S: Samples | Pcm16) -> None:
        """Takes samples, float32 in [-1, 1] or int16, of any number behind those already held.

        The array is kept until its last window is cut, so the caller does not write to it any
        more. Raises StreamStateError after `finish`, or for another shape or dtype.
        """
        if self._is_finished:
            raise StreamStateError(
                f"{samples_S.size} samples arrived after the end of the stream; open a new stream"
            )
        check_samples(samples_S)
        num_samples = samples_S.size
        if not num_samples:
            return
        self._pieces.append(samples_S)
        self._num_float_pieces += samples_S.dtype == FLOAT32
        self._buffered_samples += num_samples
        self._heard_samples += num_samples
        self.num_ready_windows = self._count_full_windows()

    def finish(self, *, tail_padding: bool) -> None:
        """Marks the end of the stream.

        Without tail padding the last window may be partly valid, as in WeNet's chunk loop. With
        it, one window of silence follows the last sample, if there was any, and every window is
        fully valid. Raises StreamStateError when called twice.
        """
        if self._is_finished:
            raise StreamStateError("the stream has already ended; finish it once")
        self._is_finished = True
        self._has_tail_padding = tail_padding
        self.num_ready_windows = self._count_last_windows()

    def discard(self) -> None:
        """Ends the stream at once: what is held is dropped and no window follows.

        Allowed before and after `finish`; a second call changes nothing.
        """
        self._is_finished = True
        self._is_discarded = True
        self.num_ready_windows = 0
        self._pass(self._buffered_samples)

    def pop_window(self, into: Samples | Pcm16) -> WindowFrames:
        """Writes the next window into a row of `window_samples` and moves on by a stride.

        The row is float32, or int16 where `holds_pcm16`. Returns its feature frames;
        samples after the last valid one are zero. Raises StreamStateError, and moves
        nothing, if no window is ready or the row doesn't fit.
        """
        geometry = self.geometry
        fits = into.dtype == FLOAT32 or (into.dtype == PCM16 and self.holds_pcm16)
        if into.shape != (geometry.window_samples,) or not fits:
            raise StreamStateError(
                f"window row is {into.dtype} of shape {into.shape}; pass float32, or int16 where "
                f"holds_pcm16 says so, of shape ({geometry.window_samples},)"
            )
        if self.num_ready_windows < 1:
            raise StreamStateError(
                f"no window is ready: {self.buffered_samples} of {geometry.window_samples} "
                "samples are held; wait for num_ready_windows > 0"
            )
        num_frames = geometry.window_frames
        if self._is_finished:
            num_frames = self._last_window_frames()
            num_copied = min(self._buffered_samples, geometry.frames.num_samples(num_frames))
            into[num_copied:] = 0
            into = into[:num_copied]
        self._copy_first(into)
        self._pass(min(geometry.stride_samples, self._buffered_samples))
        self._popped_windows += 1
        self.num_ready_windows -= 1
        return WindowFrames(num_frames, num_frames)

    def check_integrity(self) -> None:
        """Raises StreamStateError unless counters and held samples agree."""
        released = min(self._popped_windows * self.geometry.stride_samples, self._heard_samples)
        if self._is_discarded:
            released = self._heard_samples
        num_held = sum(piece.size for piece in self._pieces) - self._passed
        num_float = sum(piece.dtype == FLOAT32 for piece in self._pieces)
        is_passed = bool(self._pieces) and self._passed >= self._pieces[0].size
        if (num_held, num_float) != (self.buffered_samples, self._num_float_pieces) or is_passed:
            raise StreamStateError(
                f"{num_held} samples in {len(self._pieces)} arrays, {num_float} of them float32, "
                f"are not the {self.buffered_samples} and {self._num_float_pieces} that are "
                "counted; close the stream"
            )
        if self.buffered_samples != self._heard_samples - released:
            raise StreamStateError(
                f"{self.buffered_samples} samples are held, but {self._heard_samples} were heard "
                f"and {released} released; close the stream"
            )
        num_ready = self._count_last_windows() if self._is_finished else self._count_full_windows()
        if self.num_ready_windows != (0 if self._is_discarded else num_ready) or num_ready < 0:
            raise StreamStateError(
                f"{self.num_ready_windows} windows are said to be ready, {num_ready} are; close "
                "the stream"
            )

    def _count_full_windows(self) -> int:
        return self.geometry.num_full_windows(self._buffered_samples)

    def _count_last_windows(self) -> int:
        """Windows left in a stream that has ended."""
        return self.geometry.num_last_windows(
            self._heard_samples,
            num_popped=self._popped_windows,
            tail_padding=self._has_tail_padding,
        )

    def _last_window_frames(self) -> int:
        """Frames of the next window of a stream that has ended."""
        return self.geometry.last_window_frames(
            self._heard_samples,
            num_popped=self._popped_windows,
            tail_padding=self._has_tail_padding,
        )

    def _copy_first(self, into: Samples | Pcm16) -> None:
        """Fills `into` with the oldest samples held."""
        begin, skipped = 0, self._passed
        for piece in self._pieces:
            part = piece[skipped : skipped + into.size - begin]
            end = begin + part.size
            if part.dtype == into.dtype:
                into[begin:end] = part
            else:
                np.multiply(part, PCM16_SCALE, out=into[begin:end])
            if end == into.size:
                return
            begin, skipped = end, 0

    def _pass(self, num_samples: int) -> None:
        """Lets go of the oldest samples."""
        self._buffered_samples -= num_samples
        self._passed += num_samples
        pieces = self._pieces
        while pieces and self._passed >= pieces[0].size:
            piece = pieces.popleft()
            self._passed -= piece.size
            self._num_float_pieces -= piece.dtype == FLOAT32
