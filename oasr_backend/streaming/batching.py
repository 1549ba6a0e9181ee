"""Which streams share a step, and their windows as one array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from oasr_backend.features import WindowGeometry
from oasr_backend.features.samples import FLOAT32, PCM16
from oasr_backend.streaming.store import StepRows
from oasr_backend.streaming.streams import Stream

#: Below this a second part's fixed cost on the device is more than what the host does beside it.
LEAST_SPLIT_WIDTH = 128

#: Rows for a step's windows, by the type of the samples.
Staging = Mapping[np.dtype[Any], npt.NDArray[Any]]


@dataclass(frozen=True)
class StepBatch:
    """One step's rows: whose they are, and their windows.

    `windows` is (B, S) samples, float32 or int16, or (B, W, F) features where those are fed
    directly.
    """

    rows: StepRows
    windows: npt.NDArray[np.float32] | npt.NDArray[np.int16]

    @property
    def width(self) -> int:
        return self.rows.width

    def halves(self) -> tuple[StepBatch, StepBatch]:
        """The same rows as two batches, for a step that does not fit into memory."""
        middle = self.width // 2
        return self._part(slice(0, middle)), self._part(slice(middle, None))

    def _part(self, rows: slice) -> StepBatch:
        return StepBatch(self.rows.part(rows), self.windows[rows])


def next_batch(
    streams: Iterable[Stream], *, max_step_streams: int, shares: int = 1
) -> list[Stream]:
    """The first streams with a full window, each once: a long chunk takes turns as all do.

    Of `shares` equal parts one, rounded up: the others are for steps that are about to begin.
    """
    ready = (stream for stream in streams if stream.has_ready_window)
    if shares == 1:
        return list(islice(ready, max_step_streams))
    found = list(islice(ready, max_step_streams * shares))
    return found[: -(-len(found) // shares)]


def split_step(streams: Sequence[Stream]) -> tuple[Sequence[Stream], Sequence[Stream]]:
    """Who steps at once and who in a second part, which is empty where it would not pay.

    Those that end come first. One of them with a further window needs a second part anyway.
    """
    goes_on = any(one.audio.is_finished and one.audio.num_ready_windows > 1 for one in streams)
    if not goes_on and len(streams) < LEAST_SPLIT_WIDTH:
        return streams, []
    in_order = sorted(streams, key=lambda stream: not stream.audio.is_finished)
    middle = -(-len(streams) // 2)
    return in_order[:middle], in_order[middle:]


def slots_of(streams: Sequence[Stream]) -> npt.NDArray[np.int64]:
    """(B,) the rows that these streams have in the store."""
    return np.array([stream.slot for stream in streams], dtype=np.int64)


def stack_windows(
    streams: Sequence[Stream],
    slots_B: npt.NDArray[np.int64],
    geometry: WindowGeometry,
    *,
    into: Staging,
) -> StepBatch:
    """Moves each stream's next window into a row of `into` (at least B, window_samples).

    16-bit samples stay that as long as no stream of the step brings others: half to move.
    """
    all_pcm16 = all(stream.audio.holds_pcm16 for stream in streams)
    windows = into[PCM16 if all_pcm16 else FLOAT32][: len(streams)]
    popped = [stream.audio.pop_window(row) for stream, row in zip(streams, windows, strict=True)]
    valid_B, real_B = np.array(popped, dtype=np.int64).reshape(-1, 2).T
    # Nearly all windows are full, so there are few numbers of frames.
    encoder_frames = {valid: geometry.num_encoder_frames(valid) for valid in set(valid_B.tolist())}
    num_frames_B = np.array([encoder_frames[valid] for valid in valid_B.tolist()], dtype=np.int64)
    return StepBatch(StepRows(slots_B, num_frames_B, real_B), windows)
