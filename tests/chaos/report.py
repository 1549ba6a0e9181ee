"""What a run has to show: one line per promise, and the figures behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.load.statistics import summary_ms
from tests.chaos.behaving import Outcome
from tests.chaos.caller import Record
from tests.chaos.health import Memory, Streams, creep_per_minute, slope_per_minute

#: How much a run may grow in all: a new worst case takes a few MiB from the heap once, in a step.
#: Regions in /dev/shm grow in steps of 8 MiB.
RSS_STEPS_KIB = 32 * 1024
SHM_STEPS_KIB = 8 * 1024
#: How fast it may creep. Steps do not count here; while a process settles it creeps by an amount,
#: a leak by a rate, and a run may show whichever is more.
RSS_SETTLING_KIB = 12 * 1024
RSS_CREEP_KIB_PER_MIN = 1024
#: The first part of a run, in which caches and pools find their size, is left out.
SETTLING_SHARE = 1 / 3


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass
class ChaosReport:
    seconds: float
    speed: float
    capacity_audio_s_per_s: float
    checks: list[Check]
    behaving: Outcome
    record: Record
    memory: list[Memory]
    metrics: dict[str, float]

    @property
    def failed(self) -> list[str]:
        return [f"{check.name}: {check.detail}" for check in self.checks if not check.passed]

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "chaos",
            "seconds": round(self.seconds, 1),
            "behaving_speed": round(self.speed, 3),
            "solo_audio_s_per_s": round(self.capacity_audio_s_per_s, 1),
            "passed": not self.failed,
            "checks": [asdict(check) for check in self.checks],
            "behaving": {
                "texts": self.behaving.num_texts,
                "errors": dict(self.behaving.errors),
                "chunk_ms": summary_ms(self.behaving.chunk_s),
                "final_ms": summary_ms(self.behaving.final_s),
            },
            "answers": {f"{a} {s}": n for (a, s), n in sorted(self.record.answers.items())},
            "unexpected": self.record.unexpected,
            "memory": [asdict(sample) for sample in self.memory],
            "metrics": self.metrics,
        }

    def render(self) -> str:
        lines = [
            f"{'answer of the hostile':32}   count",
            *(f"{a + ' ' + s:32} {n:7}" for (a, s), n in sorted(self.record.answers.items())),
            *(f"  unexpected: {text}" for text in self.record.unexpected),
            *(f"  behaving: {n} x {text}" for text, n in self.behaving.errors.items()),
            f"behaving clients: {self.behaving.num_texts} texts at {self.speed:.2f} x real time; "
            f"final {summary_ms(self.behaving.final_s)}",
            *(f"{name:32} {value:11.1f}" for name, value in self.metrics.items()),
            *(f"{_mark(one)} {one.name:34} {one.detail}" for one in self.checks),
        ]
        return "\n".join(lines)


def _mark(check: Check) -> str:
    return "ok    " if check.passed else "FAILED"


def text_checks(behaving: Outcome, record: Record, *, num_clients: int) -> Iterable[Check]:
    wrong = behaving.wrong_texts
    yield Check("texts of behaving clients exact", not wrong, _first(wrong, behaving.num_texts))
    yield Check(
        "behaving clients were served",
        behaving.num_texts >= num_clients,
        f"{behaving.num_texts} texts for {num_clients} clients",
    )
    yield Check(
        "no error for behaving clients", not behaving.errors, f"{dict(behaving.errors) or 'none'}"
    )
    yield Check(
        "texts of hostile clients exact",
        not record.wrong_texts,
        _first(record.wrong_texts, record.num_texts),
    )
    yield Check(
        "hostile clients get the right answer",
        not record.num_unexpected,
        f"{record.num_unexpected} of {sum(record.answers.values())} unexpected",
    )


def hang_checks(behaving: Outcome, record: Record, *, unfinished: int) -> Iterable[Check]:
    misses = (behaving.deadline_misses, record.deadline_misses)
    yield Check(
        "no hangs",
        not any(misses) and not unfinished,
        f"deadline misses: behaving {misses[0]}, hostile {misses[1]}; "
        f"clients that did not end: {unfinished}",
    )


def leak_checks(before: Streams, after: Streams) -> Iterable[Check]:
    yield Check("no stream left", after.active == 0, f"{after.active} active")
    yield Check(
        "all blocks back",
        after.free_blocks == before.free_blocks and after.used_blocks == before.used_blocks,
        f"{after.free_blocks} free, {before.free_blocks} at first",
    )


def memory_checks(samples: list[Memory]) -> Iterable[Check]:
    settled = samples[int(len(samples) * SETTLING_SHARE) :]
    at_s = [sample.at_s for sample in settled]
    minutes = (at_s[-1] - at_s[0]) / 60 if len(settled) > 1 else 0.0
    if not minutes:
        yield Check("memory was watched", False, f"{len(settled)} samples; run for longer")
        return
    rss, shm = [one.rss_kib for one in settled], [one.shm_kib for one in settled]
    slopes = [slope_per_minute(at_s, values) for values in (rss, shm)]
    yield _bounded("RSS flat", rss, slopes[0], RSS_STEPS_KIB / minutes)
    creep_bound = max(RSS_CREEP_KIB_PER_MIN, RSS_SETTLING_KIB / minutes)
    yield _bounded("RSS does not creep", rss, creep_per_minute(at_s, rss), creep_bound)
    yield _bounded("/dev/shm flat", shm, slopes[1], SHM_STEPS_KIB / minutes)


def _bounded(name: str, values_kib: list[int], per_minute: float, bound: float) -> Check:
    detail = (
        f"{per_minute:+.0f} KiB/min, bound {bound:.0f}; {values_kib[0]} -> {values_kib[-1]} KiB"
    )
    return Check(name, per_minute <= bound, detail)


def _first(wrong: list[str], num_texts: int) -> str:
    return f"{len(wrong)} of {num_texts} wrong" + (f", first: {wrong[0]}" if wrong else "")
