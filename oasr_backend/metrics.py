"""What an operator wants to see, counted on the host; it is published elsewhere."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from oasr_backend.errors import (
    DeviceLostError,
    InvalidRequestError,
    StepFailedError,
    StreamCancelledError,
    StreamLimitError,
    UnknownStreamError,
)

Kind = Literal["counter", "gauge"]

_WIDTH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_REFUSALS = tuple(
    error.__name__
    for error in (
        InvalidRequestError, UnknownStreamError, StreamLimitError, StreamCancelledError,
        StepFailedError, DeviceLostError,
    )
)  # fmt: skip
_ENDS = ("end", "length", "cancelled", "refused", "replaced", "failed", "unload")
_SECOND_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Reading(NamedTuple):
    """One time series at one moment. Counters hold the total since the start."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, str]
    value: float
    #: Means something only beside the reading before it, and so is published with it.
    is_paired: bool = False


def heartbeat(standing_s: float = 0.0, *, is_unloaded: bool = False) -> Reading:
    """Shows that the model lives: its other readings stay as they are when it dies or hangs.

    standing_s: seconds since it last moved. Whole seconds are published, so that an idle model has
    one reading a second. A model that is unloaded has 0, since its readings stay too.
    """
    text = "Unix time when the model last moved; it stands still at death or hang, 0 once unloaded"
    value = 0 if is_unloaded else int(time.time() - standing_s)
    return Reading("oasr_heartbeat_seconds", "gauge", text, {}, value)


@dataclass
class Histogram:
    """Cumulative buckets as Prometheus defines them; `bounds` are upper limits, inclusive."""

    name: str
    help: str
    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def readings(self) -> Iterator[Reading]:
        """Widest bucket first, so that a reader between two of them never sees a count fall."""
        cumulative = list(accumulate(self.counts))
        yield Reading(f"{self.name}_count", "counter", self.help, {}, cumulative[-1])
        yield Reading(f"{self.name}_sum", "counter", self.help, {}, self.total, is_paired=True)
        bounds = [*map(str, self.bounds), "+Inf"]
        for bound, count in zip(reversed(bounds), reversed(cumulative), strict=True):
            yield Reading(f"{self.name}_bucket", "counter", self.help, {"le": bound}, count)


@dataclass
class EngineMetrics:
    """Counted by the engine, under its lock."""

    streams_opened: int = 0
    streams_reaped: int = 0
    conflicts: int = 0
    loud_chunks: int = 0
    audio_s: float = 0.0
    compute_s: float = 0.0
    # There from the start, so that the first of a kind is an increase and not a new series.
    rejected: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_REFUSALS, 0)))
    finished: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_ENDS, 0)))
    step_width: Histogram = field(
        default_factory=lambda: Histogram("oasr_step_width", "Streams of a step", _WIDTH_BOUNDS)
    )
    step_s: Histogram = field(
        default_factory=lambda: Histogram("oasr_step_seconds", "Time of a step", _SECOND_BOUNDS)
    )

    def step_done(self, num_streams: int, seconds: float) -> None:
        self.step_width.observe(num_streams)
        self.step_s.observe(seconds)
        self.compute_s += seconds

    def readings(self) -> Iterator[Reading]:
        for name, text, value in (
            ("streams_opened", "Streams opened", self.streams_opened),
            ("streams_reaped", "Streams freed for silence", self.streams_reaped),
            ("conflicts", "START for a stream that was live", self.conflicts),
            ("loud_chunks", "FP32 chunks far outside [-1, 1]: unscaled PCM?", self.loud_chunks),
            ("audio_seconds", "Audio received", self.audio_s),
            ("compute_seconds", "Time of all steps", self.compute_s),
        ):  # fmt: skip
            yield Reading(f"oasr_{name}_total", "counter", text, {}, value)
        for name, text, counter in (
            ("rejected", "Requests answered with an error", self.rejected),
            ("finished", "Streams ended, by reason", self.finished),
        ):
            for reason, value in counter.items():
                yield Reading(f"oasr_{name}_total", "counter", text, {"reason": reason}, value)
        yield from self.step_width.readings()
        yield from self.step_s.readings()
