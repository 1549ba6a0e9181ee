"""Judges a run: one line per promise, and the figures behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.chaos.behaving import Outcome
from benchmarks.chaos.caller import Record
from benchmarks.chaos.health import Memory, Streams, slope_per_minute
from benchmarks.load.statistics import summary_ms

#: A run is long enough for this bound from so many watched minutes on. Memory that comes and goes
#: tilts the fit of a shorter one more than a leak does, so that one may grow by an amount instead.
RSS_KIB_PER_MIN = 640
LONG_RUN_MIN = 4.5
RSS_STEPS_KIB = 24 * 1024
#: Triton's regions in /dev/shm grow in steps of 8 MiB.
SHM_STEPS_KIB = 8 * 1024
#: At rest a run may hold this much more than before. Shared memory has none. In the heap the first
#: few thousand cancelled calls leave 2 MiB and later ones nothing. The samples of one request are
#: some 40 KiB: were they kept for one stream in forty, it would show.
SHM_REST_KIB = 64
HEAP_REST_KIB = 2 * 1024
HEAP_REST_KIB_PER_STREAM = 1
PYTHON_REST_BLOCKS = 20_000
#: The first part of a run, in which caches and pools find their size, is left out: tritonserver
#: takes five minutes of ten, and holds still from then on.
SETTLING_SHARE = 1 / 2


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
            "deeds": dict(sorted(self.record.deeds.items())),
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


def missing_deeds(record: Record, deeds: Iterable[str]) -> list[str]:
    return [deed for deed in deeds if not record.deeds[deed]]


def deed_check(record: Record, deeds: Iterable[str]) -> Check:
    """A run without one of its acts proves nothing about it."""
    missing = missing_deeds(record, deeds)
    done = ", ".join(f"{deed} {record.deeds[deed]}" for deed in deeds)
    return Check("every act took place", not missing, f"missing: {missing}" if missing else done)


def text_checks(behaving: Outcome, record: Record, *, num_clients: int) -> Iterable[Check]:
    wrong = behaving.wrong_texts
    yield Check("texts of behaving clients exact", not wrong, _first(wrong, behaving.num_texts))
    yield Check(
        "behaving clients were served",
        len(behaving.texts_by_client) == num_clients,
        f"{behaving.num_texts} texts; {len(behaving.texts_by_client)} of {num_clients} clients",
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
    rss_bound = RSS_KIB_PER_MIN if minutes >= LONG_RUN_MIN else RSS_STEPS_KIB / minutes
    for who in ("server", "stub"):
        rss = [getattr(one, f"{who}_kib") for one in settled]
        yield _bounded(f"RSS of the {who} flat", rss, slope_per_minute(at_s, rss), rss_bound)
    shm = [one.shm_kib for one in settled]
    yield _bounded("/dev/shm flat", shm, slope_per_minute(at_s, shm), SHM_STEPS_KIB / minutes)


def rest_checks(before: Memory, after: Memory, *, num_streams: int) -> Iterable[Check]:
    """What the model's process held before `num_streams` were opened and holds after them.

    It serves no stream at either moment.
    """
    heap_bound_kib = HEAP_REST_KIB + HEAP_REST_KIB_PER_STREAM * num_streams
    for name, unit, old, new, bound in (
        ("shared memory given back", "KiB", before.shm_used_kib, after.shm_used_kib, SHM_REST_KIB),
        ("heap given back", "KiB", before.heap_kib, after.heap_kib, heap_bound_kib),
        ("Python objects given back", "blocks", before.python_blocks, after.python_blocks,
         PYTHON_REST_BLOCKS),
    ):  # fmt: skip
        detail = f"{old} -> {new} {unit}, {new - old:+}, bound {bound}"
        yield Check(name, new - old <= bound, detail)


def _bounded(name: str, values_kib: list[int], per_minute: float, bound: float) -> Check:
    detail = (
        f"{per_minute:+.0f} KiB/min, bound {bound:.0f}; {values_kib[0]} -> {values_kib[-1]} KiB"
    )
    return Check(name, per_minute <= bound, detail)


def _first(wrong: list[str], num_texts: int) -> str:
    return f"{len(wrong)} of {num_texts} wrong" + (f", first: {wrong[0]}" if wrong else "")
