"""The little of Prometheus' text format that Triton's metrics port needs."""

from __future__ import annotations

import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# The metrics port of a server under test is never behind a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Sample:
    labels: Mapping[str, str]
    value: float


class Metrics:
    """One reading of all metrics; counters of several model instances are added up."""

    def __init__(self, samples: Mapping[str, list[Sample]]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> Metrics:
        samples: dict[str, list[Sample]] = defaultdict(list)
        for line in text.splitlines():
            match = _LINE.match(line)
            if match:
                labels = dict(_LABEL.findall(match["labels"] or ""))
                samples[match["name"]].append(Sample(labels, float(match["value"])))
        return cls(samples)

    @classmethod
    def fetch(cls, url: str, timeout_s: float = 10.0) -> Metrics:
        """Raises OSError when no server answers."""
        with _OPENER.open(url, timeout=timeout_s) as response:
            return cls.parse(response.read().decode("utf-8"))

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples with these labels. Raises KeyError for an unknown metric."""
        if name not in self._samples:
            raise KeyError(f"the server publishes no metric {name}; is it of this release?")
        return sum(sample.value for sample in self._matching(name, labels))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        totals: dict[str, float] = defaultdict(float)
        for sample in self._matching(name, {}):
            totals[sample.labels.get(label, "")] += sample.value
        return dict(totals)

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterator[Sample]:
        for sample in self._samples.get(name, []):
            if all(sample.labels.get(key) == value for key, value in labels.items()):
                yield sample


@dataclass(frozen=True)
class HistogramChange:
    """The growth of a histogram between two readings; `counts` by upper bound, not cumulative.

    The model publishes its counters a few at a time, so a reading may hold older ones beside newer
    ones. Counts are then raised to that of the narrower bucket, as Prometheus' histogram_quantile
    does, and add up to `count` but for such a difference.
    """

    counts: Mapping[str, float]
    sum: float
    count: float

    @classmethod
    def between(cls, before: Metrics, after: Metrics, name: str) -> HistogramChange | None:
        """The histogram's growth; None when the server has no such histogram."""
        if f"{name}_count" not in after:
            return None
        old, new = (reading.by_label(f"{name}_bucket", "le") for reading in (before, after))
        cumulative = {bound: value - old.get(bound, 0.0) for bound, value in new.items()}
        counts, below = {}, 0.0
        for bound in sorted(cumulative, key=float):
            up_to = max(below, cumulative[bound])
            counts[bound] = up_to - below
            below = up_to
        return cls(counts, *(_gain(before, after, f"{name}_{part}") for part in ("sum", "count")))

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0


def _gain(before: Metrics, after: Metrics, name: str) -> float:
    return after.total(name) - (before.total(name) if name in before else 0.0)


def gain(before: Metrics, after: Metrics, name: str) -> float | None:
    """How much a counter grew; None when the server has none of that name."""
    return _gain(before, after, name) if name in after else None
