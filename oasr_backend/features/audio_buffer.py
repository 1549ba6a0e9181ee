"""The samples of one stream on their way into encoder windows of fixed size.

    samples  |--------------------- window_samples ---------------------|
             |---------------- stride_samples -----------------|
                                                               |-- next window ...

Consecutive windows overlap by the encoder's right context, so nothing is carried over but samples.
Where frames do not snip the edges, the samples that mirroring adds come first and last.
"""

from __future__ import annotations

from typing import NamedTuple

from oasr_backend.errors import StreamStateError
from oasr_backend.features.geometry import WindowGeometry
from oasr_backend.features.held import HeldSamples
from oasr_backend.features.mirror import EdgeMirror
from oasr_backend.features.samples import FLOAT32, PCM16, check_samples
from oasr_backend.types import Pcm16, Samples


class WindowFrames(NamedTuple):
    """Feature frames of one window: `num_valid` are heard, the first `num_real` hold samples."""

    num_valid: int
    num_real: int


class AudioBuffer:
    """Cuts one stream into windows; the result doesn't depend on how the samples arrive."""

    def __init__(self, geometry: WindowGeometry) -> None:
        self.geometry = geometry
        self._mirror = EdgeMirror(geometry.frames)
        self._held = HeldSamples()
        self._heard_samples = 0
        self._popped_windows = 0
        #: Windows that `pop_window` can give now. After `finish`, all that will ever come.
        self.num_ready_windows = 0
        self._is_finished = False
        self._has_tail_padding = False
        self._is_discarded = False

    @property
    def heard_samples(self) -> int:
        """Samples accepted since the stream began; what is padded or mirrored doesn't count."""
        return self._heard_samples

    @property
    def buffered_samples(self) -> int:
        """Samples held, mirrored ones too."""
        return self._held.size

    @property
    def popped_windows(self) -> int:
        return self._popped_windows

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def holds_pcm16(self) -> bool:
        """Whether the next window can be had as 16-bit samples."""
        return self._held.is_pcm16

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
        self._heard_samples += samples_S.size
        self._held.append(samples_S)
        self._hold_lead()
        self.num_ready_windows = self._count_full_windows()

    def finish(self, *, tail_padding: bool) -> None:
        """Marks the end of the stream.

        Without tail padding the last window may be partly valid, as in WeNet's chunk loop. With
        it every window is fully valid: `tail_frames` of the family's padding follow the last real
        frame, or else a window of silence the last sample, if there was any. Raises
        StreamStateError when called twice.
        """
        if self._is_finished:
            raise StreamStateError("the stream has already ended; finish it once")
        self._is_finished = True
        self._has_tail_padding = tail_padding
        self._hold_lead()
        if not tail_padding or self.geometry.tail_frames is not None:
            self._held.append(self._mirror.tail(self._held.pieces, self._heard_samples))
        self.num_ready_windows = self._count_last_windows()

    def discard(self) -> None:
        """Ends the stream at once: what is held is dropped and no window follows.

        Allowed before and after `finish`; a second call changes nothing.
        """
        self._is_finished = True
        self._is_discarded = True
        self.num_ready_windows = 0
        self._held.let_go(self._held.size)

    def pop_window(self, into: Samples | Pcm16) -> WindowFrames:
        """Writes the next window into a row of `window_samples` and moves on by a stride.

        The row is float32, or int16 where `holds_pcm16`. Returns its feature frames; samples
        after the last real one are zero. Raises StreamStateError, and moves nothing, if no window
        is ready or the row doesn't fit.
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
        num_valid = num_real = geometry.window_frames
        if self._is_finished:
            num_real = self._last_real_frames()
            num_valid = num_valid if self._has_tail_padding else num_real
            num_copied = geometry.frames.num_samples(num_real) if num_real else 0
            num_copied = min(self._held.size, num_copied)
            into[num_copied:] = 0
            into = into[:num_copied]
        self._held.copy_first(into)
        self._held.let_go(min(geometry.stride_samples, self._held.size))
        self._popped_windows += 1
        self.num_ready_windows -= 1
        return WindowFrames(num_valid, num_real)

    def check_integrity(self) -> None:
        """Raises StreamStateError unless counters and held samples agree."""
        self._held.check_integrity()
        released = min(self._popped_windows * self.geometry.stride_samples, self._num_samples)
        if self._is_discarded:
            released = self._num_samples
        if self.buffered_samples != self._num_samples - released:
            raise StreamStateError(
                f"{self.buffered_samples} samples are held, but {self._heard_samples} were heard, "
                f"{self._mirror.num_made} mirrored and {released} released; close the stream"
            )
        num_ready = self._count_last_windows() if self._is_finished else self._count_full_windows()
        if self.num_ready_windows != (0 if self._is_discarded else num_ready) or num_ready < 0:
            raise StreamStateError(
                f"{self.num_ready_windows} windows are said to be ready, {num_ready} are; close "
                "the stream"
            )

    @property
    def _num_samples(self) -> int:
        """Of the whole stream so far, mirrored ones too."""
        return self._heard_samples + self._mirror.num_made

    def _count_full_windows(self) -> int:
        return self.geometry.num_full_windows(self._held.size)

    def _count_last_windows(self) -> int:
        """Windows left in a stream that has ended."""
        return self.geometry.num_last_windows(
            self._num_samples,
            num_popped=self._popped_windows,
            tail_padding=self._has_tail_padding,
        )

    def _last_real_frames(self) -> int:
        """Real frames of the next window of a stream that has ended."""
        return self.geometry.last_real_frames(
            self._num_samples,
            num_popped=self._popped_windows,
            tail_padding=self._has_tail_padding,
        )

    def _hold_lead(self) -> None:
        """Puts the mirrored samples in front, if they are due."""
        self._held.put_in_front(
            self._mirror.lead(self._held.pieces, self._heard_samples, has_ended=self._is_finished)
        )
