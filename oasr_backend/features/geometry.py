"""How samples become feature frames, and feature frames become encoder windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from oasr_backend.errors import ConfigError


def count_windows(available: int, first: int, step: int) -> int:
    """How many windows of `first` units, each `step` later, fit into `available` units."""
    return (available - first) // step + 1 if available >= first else 0


@dataclass(frozen=True)
class WindowGeometry:
    """How samples become feature frames, and frames become encoder windows.

    `min_frames` is the fewest feature frames that give one encoder frame; every further
    `subsampling` frames give one more.
    """

    window_frames: int
    stride_frames: int
    min_frames: int = 7
    subsampling: int = 4
    frame_length_samples: int = 400
    frame_shift_samples: int = 160
    sample_rate: int = 16000

    @property
    def encoder_frame_s(self) -> float:
        return self.subsampling * self.frame_shift_samples / self.sample_rate

    def __post_init__(self) -> None:
        """Raises ConfigError for a window that would skip frames or yield no encoder frame."""
        sizes = (self.stride_frames, self.subsampling, self.frame_shift_samples, self.sample_rate)
        if min(sizes) < 1:
            raise ConfigError(
                f"stride of {self.stride_frames} frames, subsampling {self.subsampling}, frame "
                f"shift of {self.frame_shift_samples} samples and sample rate of "
                f"{self.sample_rate} Hz must each be at least 1; raise them"
            )
        if self.frame_length_samples < self.frame_shift_samples:
            raise ConfigError(
                f"frame of {self.frame_length_samples} samples is shorter than its shift of "
                f"{self.frame_shift_samples}; lengthen the frame"
            )
        if not max(self.min_frames, self.stride_frames) <= self.window_frames:
            raise ConfigError(
                f"window of {self.window_frames} frames is shorter than its stride of "
                f"{self.stride_frames} or the minimum of {self.min_frames}; lengthen the window"
            )
        if self.min_frames < 1 or self.stride_frames % self.subsampling:
            raise ConfigError(
                f"stride of {self.stride_frames} frames is no multiple of subsampling "
                f"{self.subsampling}, or min_frames {self.min_frames} is below 1; change them"
            )

    @classmethod
    def for_chunk(
        cls, chunk_frames: int, *, subsampling: int = 4, right_context: int = 6
    ) -> WindowGeometry:
        """The window of a WeNet encoder that emits `chunk_frames` encoder frames at a time."""
        return cls(
            window_frames=(chunk_frames - 1) * subsampling + right_context + 1,
            stride_frames=chunk_frames * subsampling,
            min_frames=right_context + 1,
            subsampling=subsampling,
        )

    @cached_property
    def window_samples(self) -> int:
        return self.num_samples(self.window_frames)

    @cached_property
    def stride_samples(self) -> int:
        return self.stride_frames * self.frame_shift_samples

    def num_samples(self, num_frames: int) -> int:
        """Samples under `num_frames` >= 1 consecutive feature frames."""
        return self.frame_length_samples + (num_frames - 1) * self.frame_shift_samples

    def num_frames(self, num_samples: int) -> int:
        """Whole feature frames in `num_samples`."""
        return count_windows(num_samples, self.frame_length_samples, self.frame_shift_samples)

    def num_encoder_frames(self, num_frames: int) -> int:
        """Encoder frames that come out of `num_frames` valid feature frames of one window."""
        return count_windows(num_frames, self.min_frames, self.subsampling)
