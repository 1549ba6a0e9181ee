"""Frame arithmetic: how samples become feature frames, and frames become encoder windows.

A front end says what a frame is, and an encoder says which frames it reads. Every count that
follows from the two is made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from oasr_backend.errors import ConfigError, check_whole


def count_windows(available: int, first: int, step: int) -> int:
    """How many windows of `first` units, each `step` later, fit into `available` units."""
    return (available - first) // step + 1 if available >= first else 0


@dataclass(frozen=True)
class FrameGeometry:
    """What a front end's frame is: `num_bins` features of so many samples.

    Without `snips_edges` frame t lies around sample (t + 1/2) shifts, and a stream is mirrored at
    its ends to fill the outer frames, as in Kaldi's feature-window.

    Raises ConfigError for a value that is no whole number or is below 1, by its name, for frames
    between which samples would be lost, and for mirrored frames without a middle.
    """

    sample_rate: int
    frame_length_samples: int
    frame_shift_samples: int
    num_bins: int
    snips_edges: bool = True

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "snips_edges"}
        check_whole("the front end's geometry", least=1, **sizes)
        if self.frame_length_samples < self.frame_shift_samples:
            raise ConfigError(
                f"frame of {self.frame_length_samples} samples is shorter than its shift of "
                f"{self.frame_shift_samples}; lengthen the frame"
            )
        if not self.snips_edges and self.frame_length_samples % 2:
            raise ConfigError(
                f"frame of {self.frame_length_samples} samples has no middle, which mirrored edges "
                "need; give it an even number of samples, or snip the edges"
            )

    @cached_property
    def lead_samples(self) -> int:
        """Mirrored samples in front of a stream's first, so that whole frames follow."""
        if self.snips_edges:
            return 0
        return self.frame_length_samples // 2 - self.frame_shift_samples // 2

    def num_stream_frames(self, num_samples: int) -> int:
        """Frames of a stream that has ended after `num_samples`, mirrored ones not counted."""
        if self.snips_edges:
            return self.num_frames(num_samples)
        shift = self.frame_shift_samples
        return (num_samples + shift // 2) // shift

    def num_frames(self, num_samples: int) -> int:
        """Whole frames in `num_samples`."""
        return count_windows(num_samples, self.frame_length_samples, self.frame_shift_samples)

    def num_samples(self, num_frames: int) -> int:
        """Samples under `num_frames` >= 1 consecutive frames."""
        return self.frame_length_samples + (num_frames - 1) * self.frame_shift_samples


@dataclass(frozen=True)
class WindowGeometry:
    """The windows that an encoder reads, in feature frames and in samples.

    `min_frames` is the fewest feature frames that give one encoder frame; every further
    `subsampling` frames give one more. Raises ConfigError for a window that would skip frames or
    give no encoder frame.
    """

    frames: FrameGeometry
    window_frames: int
    stride_frames: int
    min_frames: int
    subsampling: int
    # Feature frames of padding behind the last real one at END; None: a window of silent samples.
    tail_frames: int | None = None

    def __post_init__(self) -> None:
        if min(self.stride_frames, self.subsampling, self.min_frames) < 1:
            raise ConfigError(
                f"stride of {self.stride_frames} frames, subsampling {self.subsampling} and a "
                f"minimum of {self.min_frames} frames must each be at least 1; raise them"
            )
        if not max(self.min_frames, self.stride_frames) <= self.window_frames:
            raise ConfigError(
                f"window of {self.window_frames} frames is shorter than its stride of "
                f"{self.stride_frames} or the minimum of {self.min_frames}; lengthen the window"
            )
        if self.stride_frames % self.subsampling:
            raise ConfigError(
                f"stride of {self.stride_frames} frames is no multiple of subsampling "
                f"{self.subsampling}; change one of them"
            )

    @classmethod
    def of(
        cls,
        frames: FrameGeometry,
        *,
        chunk_frames: int,
        subsampling: int,
        right_context_frames: int,
        tail_frames: int | None = None,
    ) -> WindowGeometry:
        """The window of an encoder that gives `chunk_frames` encoder frames at a time.

        `right_context_frames`: feature frames after its first that one encoder frame needs.
        """
        return cls(
            frames,
            window_frames=(chunk_frames - 1) * subsampling + right_context_frames + 1,
            stride_frames=chunk_frames * subsampling,
            min_frames=right_context_frames + 1,
            subsampling=subsampling,
            tail_frames=tail_frames,
        )

    @cached_property
    def window_samples(self) -> int:
        return self.frames.num_samples(self.window_frames)

    @cached_property
    def stride_samples(self) -> int:
        return self.stride_frames * self.frames.frame_shift_samples

    @property
    def encoder_frame_s(self) -> float:
        return self.subsampling * self.frames.frame_shift_samples / self.frames.sample_rate

    def num_encoder_frames(self, num_frames: int) -> int:
        """Encoder frames that come out of `num_frames` valid feature frames of one window."""
        return count_windows(num_frames, self.min_frames, self.subsampling)

    def num_windows_of(self, num_frames: int, *, pads_tail: bool) -> int:
        """All windows of a stream that has ended after `num_frames` feature frames.

        With `pads_tail` those are followed by `tail_frames` of padding, and every window counts in
        which a frame of either begins.
        """
        if not pads_tail:
            return count_windows(num_frames, self.min_frames, self.stride_frames)
        if self.tail_frames is None or not num_frames:
            return 0
        return -(-(num_frames + self.tail_frames) // self.stride_frames)

    def num_full_windows(self, num_samples: int) -> int:
        """Windows that `num_samples` from the next window's first on fill."""
        return count_windows(num_samples, self.window_samples, self.stride_samples)

    def num_last_windows(self, num_samples: int, *, num_popped: int, tail_padding: bool) -> int:
        """Windows left in a stream that has ended after `num_samples` in all, mirrored ones too.

        `num_popped` windows of it are cut already. With tail padding `tail_frames` follow the last
        frame; without that number a window of silence follows the last sample, if there is one.
        """
        if tail_padding and self.tail_frames is None:
            return (num_samples // self.stride_samples + 1 if num_samples else 0) - num_popped
        num_frames = self.frames.num_frames(num_samples)
        return self.num_windows_of(num_frames, pads_tail=tail_padding) - num_popped

    def last_real_frames(self, num_samples: int, *, num_popped: int, tail_padding: bool) -> int:
        """Feature frames with samples in the next window of a stream that has ended.

        Silence that follows the last sample counts as samples.
        """
        if tail_padding and self.tail_frames is None:
            return self.window_frames
        left = self.frames.num_frames(num_samples) - num_popped * self.stride_frames
        return min(self.window_frames, max(0, left))
