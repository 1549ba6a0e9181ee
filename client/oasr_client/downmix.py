"""Mixes channels into one, also where they cancel each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: The mean keeps this share of the channels' power, -20 dB. N unlike channels leave 1 / N.
MIN_MEAN_POWER = 0.01
#: The limit is -14 dB once they cancel, so that a share near one limit does not switch often.
MIN_MEAN_POWER_AGAIN = 0.04
#: One choice holds for this long, which is shorter than a sound of speech.
FRAME_S = 0.02
#: Less than this happens by chance, as when two tones meet.
MIN_TOLD_S = 0.1
#: It stands for all channels where a channel's number stands otherwise.
MEAN = -1
#: So many frames on either side of a border decide what is heard there.
_REACH = 2

Mono = npt.NDArray[np.float32]
Channels = npt.NDArray[np.float32]


class Downmix:
    """The mean of the channels; around frames in which they cancel each other, a loud one.

    It is one of them from a frame before to a frame behind those, and fades to the mean within one
    more frame. What comes out doesn't depend on the blocks' borders.
    """

    def __init__(self, sample_rate_hz: int) -> None:
        self._frame = round(FRAME_S * sample_rate_hz)
        self._held_NC: Channels | None = None
        # Each frame's channel, or MEAN. The `_REACH` frames before the held ones come first.
        self._choices = [MEAN] * _REACH
        self._min_told = round(MIN_TOLD_S / FRAME_S)
        self._num_cancelled = 0

    @property
    def has_cancelled(self) -> bool:
        """Whether channels cancelled each other for longer than they do by chance."""
        return self._num_cancelled >= self._min_told

    def mix(self, samples_NC: Channels) -> Mono:
        """The samples that no later block can change; there may be none."""
        if samples_NC.shape[1] == 1:
            return samples_NC[:, 0]
        if self._held_NC is not None:
            samples_NC = np.concatenate([self._held_NC, samples_NC])
        self._held_NC = samples_NC
        num_decided = len(self._choices) - _REACH
        num_frames = len(samples_NC) // self._frame
        self._decide(samples_NC[num_decided * self._frame : num_frames * self._frame])
        return self._release(max(0, num_frames - _REACH))

    def finish(self) -> Mono:
        """The samples that are left at the end."""
        if self._held_NC is None:
            return np.empty(0, np.float32)
        num_frames = -(-len(self._held_NC) // self._frame)
        # A last frame that is not whole is too short to judge.
        num_undecided = num_frames + _REACH - len(self._choices)
        self._choices += [self._choices[-1]] * num_undecided + [MEAN] * _REACH
        return self._release(num_frames)

    def _decide(self, samples_NC: Channels) -> None:
        frames_FNC = samples_NC.reshape(-1, self._frame, samples_NC.shape[1])
        mean_FN = frames_FNC.mean(axis=2, dtype=np.float32)
        mean_power_F = np.square(mean_FN).mean(axis=1, dtype=np.float64)
        power_FC = np.square(frames_FNC).mean(axis=1, dtype=np.float64)
        for mean_power, power_C in zip(mean_power_F, power_FC, strict=True):
            choice = _choice(mean_power, power_C, self._choices[-1])
            self._choices.append(choice)
            self._num_cancelled += choice != MEAN

    def _release(self, num_frames: int) -> Mono:
        assert self._held_NC is not None
        end = num_frames * self._frame
        samples_NC, self._held_NC = self._held_NC[:end], self._held_NC[end:]
        mixed_N: Mono = samples_NC.mean(axis=1, dtype=np.float32)
        borders = [_border(self._choices[i : i + 2 * _REACH]) for i in range(num_frames + 1)]
        for index, ends in enumerate(itertools.pairwise(borders)):
            if ends != (MEAN, MEAN):
                span = slice(index * self._frame, (index + 1) * self._frame)
                mixed_N[span] = self._faded(samples_NC[span], *ends)
        self._choices = self._choices[num_frames:]
        return mixed_N

    def _faded(self, frame_NC: Channels, first: int, last: int) -> Mono:
        """Fades linearly from one choice to another."""
        first_N, last_N = _chosen(frame_NC, first), _chosen(frame_NC, last)
        if first == last:
            return first_N
        ramp_N = np.arange(len(frame_NC), dtype=np.float32) / np.float32(self._frame)
        return first_N + ramp_N * (last_N - first_N)


def _choice(mean_power: float, power_C: npt.NDArray[np.float64], before: int) -> int:
    limit = MIN_MEAN_POWER if before == MEAN else MIN_MEAN_POWER_AGAIN
    # The test is negated, so that NaN stays in the mean and is refused by name.
    if not mean_power < limit * power_C.mean():
        return MEAN
    if before != MEAN and power_C[before] >= power_C.max() / 4:
        return before
    # Frames do not take the loudest: of two that are alike they would take now one, now the other.
    return int(np.argmax(power_C >= power_C.max() / 2))


def _border(choices: Sequence[int]) -> int:
    """The sound between two frames: a channel's where one of the two frames has chosen it."""
    return next((choice for choice in choices if choice != MEAN), MEAN)


def _chosen(samples_NC: Channels, choice: int) -> Mono:
    if choice == MEAN:
        return np.asarray(samples_NC.mean(axis=1, dtype=np.float32))
    return samples_NC[:, choice]
