"""Metrics have cumulative buckets, unique names, and values that follow the engine."""

from __future__ import annotations

import pytest

from oasr_backend.metrics import EngineMetrics, Histogram
from tests.engine_helpers import (
    ManualClock,
    ask,
    ask_one,
    chunk,
    fault_at,
    golden_engine,
    marked,
    noise,
    on_mark,
)


def test_buckets_are_cumulative_and_their_bounds_inclusive() -> None:
    histogram = Histogram("h", "help", (1, 2, 4))
    for value in (1, 2, 2, 3, 9):
        histogram.observe(value)
    samples = [(s.name, s.labels.get("le"), s.value) for s in histogram.readings()]
    assert samples == [
        ("h_count", None, 5),
        ("h_sum", None, 17),
        ("h_bucket", "+Inf", 5),
        ("h_bucket", "4", 4),
        ("h_bucket", "2", 3),
        ("h_bucket", "1", 1),
    ]


def test_counters_never_fall_and_names_follow_prometheus() -> None:
    metrics = EngineMetrics()
    metrics.rejected["StreamLimitError"] += 1
    metrics.finished["end"] += 1
    metrics.step_done(3, 0.004)
    samples = list(metrics.readings())
    assert all(s.kind == "counter" and s.value >= 0 and s.help for s in samples)
    assert all(s.name.startswith("oasr_") for s in samples)
    series = [(s.name, tuple(s.labels.items())) for s in samples]
    assert len(series) == len(set(series))
    assert ("oasr_rejected_total", (("reason", "StreamLimitError"),)) in series


def value(engine_samples: object, name: str, **labels: str) -> float:
    assert isinstance(engine_samples, list)
    (found,) = [s.value for s in engine_samples if s.name == name and s.labels == labels]
    return float(found)


def test_an_engine_counts_what_happened_to_it() -> None:
    clock = ManualClock()
    engine = golden_engine(clock, max_streams=3)
    ask(engine, *(chunk(i, noise(i), flags="S") for i in range(3)))
    ask_one(engine, 9, noise(9), flags="S")
    ask_one(engine, 0, noise(5), flags="S")
    ask_one(engine, 0, flags="E")
    with fault_at(engine, "filterbank", on_mark(ValueError("boom"))):
        ask_one(engine, 8, marked(noise(8)), flags="S")
    samples = engine.readings()
    assert value(samples, "oasr_active_streams") == 2
    assert value(samples, "oasr_max_streams") == 3
    assert value(samples, "oasr_healthy") == 1
    used = value(samples, "oasr_used_blocks")
    assert used > 0
    assert used + value(samples, "oasr_free_blocks") == engine.store.kv.pool.num_blocks
    assert value(samples, "oasr_streams_opened_total") == 5
    assert value(samples, "oasr_conflicts_total") == 1
    assert value(samples, "oasr_rejected_total", reason="StreamLimitError") == 1
    assert value(samples, "oasr_rejected_total", reason="StepFailedError") == 1
    assert value(samples, "oasr_finished_total", reason="end") == 1
    assert value(samples, "oasr_finished_total", reason="replaced") == 1
    assert value(samples, "oasr_audio_seconds_total") == pytest.approx(10.0)
    assert value(samples, "oasr_compute_seconds_total") > 0
    clock.now_s += 1000
    engine.close_idle()
    samples = engine.readings()
    assert value(samples, "oasr_streams_reaped_total") == 2
    assert value(samples, "oasr_used_blocks") == 0


def test_every_open_stream_ends_in_exactly_one_count() -> None:
    clock = ManualClock()
    engine = golden_engine(clock)
    ask_one(engine, "end", noise(1), flags="SE")
    ask_one(engine, "replaced", flags="S")
    ask_one(engine, "replaced", flags="SE")
    ask_one(engine, "cancelled", flags="S", is_cancelled=lambda: True)
    ask_one(engine, "refused", flags="S", parameters={"chunk_seq": 1})
    ask_one(engine, "refused", flags="E")
    with fault_at(engine, "filterbank", on_mark(ValueError("boom"))):
        ask_one(engine, "failed", marked(noise(2)), flags="S")
    ask_one(engine, "idle", flags="S")
    clock.now_s += 1000
    engine.close_idle()
    metrics = engine.parts.metrics
    ended = sum(metrics.finished.values()) + metrics.streams_reaped
    assert ended == metrics.streams_opened == 7
    assert metrics.finished["failed"] == 1


def test_a_stream_at_its_ceiling_is_counted_once_as_too_long() -> None:
    clock = ManualClock()
    engine = golden_engine(clock, num_left_chunks=-1, max_blocks_per_seq=2)
    for name in ("refused", "replaced", "idle"):
        ask_one(engine, name, noise(1, seconds=3), flags="S")
    ask_one(engine, "refused", flags="E")
    ask_one(engine, "replaced", flags="SE")
    clock.now_s += 1000
    engine.close_idle()
    assert +engine.parts.metrics.finished == {"length": 3, "end": 1}
    assert engine.parts.metrics.streams_reaped == 0


def test_the_widths_of_steps_are_observed() -> None:
    engine = golden_engine(max_step_streams=4)
    ask(engine, *(chunk(i, noise(i), flags="S") for i in range(6)))
    samples = engine.readings()
    narrow = value(samples, "oasr_step_width_bucket", le="2")
    assert value(samples, "oasr_step_width_bucket", le="4") > narrow > 0
    assert value(samples, "oasr_step_width_count") == value(samples, "oasr_step_seconds_count")
    assert value(samples, "oasr_step_width_sum") == 6 * 3
