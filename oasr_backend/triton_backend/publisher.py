"""What a service counts, brought to Triton's metrics port."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from oasr_backend.metrics import Reading
from oasr_backend.triton_backend.io import metric_family

#: A metric's name and its labels.
_SeriesKey = tuple[str, tuple[tuple[str, str], ...]]


class MetricsPublisher:
    """Brings a service's readings to Triton's metrics port, a few at a time.

    Every call into Triton's metrics is a round trip between processes during which no request is
    served. So counts are kept here, their differences go out in small portions, and histograms go
    out as the counters they consist of.
    """

    def __init__(
        self, readings: Callable[[], Iterable[Reading]], labels: Mapping[str, str]
    ) -> None:
        self._readings = readings
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._metrics: dict[_SeriesKey, Any] = {}
        self._published: dict[_SeriesKey, float] = {}
        self._waiting: deque[Reading] = deque()

    def publish(self) -> None:
        """Everything at once."""
        self._waiting = deque(self._readings())
        while self._waiting:
            self.publish_some()

    def publish_some(self, *, most: int = 4) -> None:
        """The next few readings that have changed; a new round begins when all have gone out."""
        self._waiting = self._waiting or deque(self._readings())
        while self._waiting and (most > 0 or self._waiting[0].is_paired):
            most -= self._publish_one(self._waiting.popleft())

    def _publish_one(self, reading: Reading) -> bool:
        """Whether the reading was news."""
        key = (reading.name, tuple(reading.labels.items()))
        change = reading.value - self._published.get(key, 0.0)
        if key in self._published and change == 0.0:
            return False
        metric = self._metric(key, reading)
        if reading.kind == "gauge":
            metric.set(reading.value)
        else:
            metric.increment(change)
        self._published[key] = reading.value
        return True

    def _metric(self, key: _SeriesKey, reading: Reading) -> Any:
        if key not in self._metrics:
            if reading.name not in self._families:
                self._families[reading.name] = metric_family(reading)
            labels = {**self._labels, **reading.labels}
            self._metrics[key] = self._families[reading.name].Metric(labels=labels)
        return self._metrics[key]
