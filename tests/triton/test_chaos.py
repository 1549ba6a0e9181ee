"""Hostile clients against a real server: the short forms of `python -m tests.chaos`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.chaos.behaving import Outcome
from tests.chaos.caller import Record
from tests.chaos.health import Memory, Streams, slope_per_minute
from tests.chaos.report import hang_checks, leak_checks, memory_checks, text_checks
from tests.chaos.run import ChaosSettings, run_chaos
from tests.chaos.scenarios import bad_requests, open_and_abandon, overload

MAX_REFUSAL_S = 0.1
#: A refusal waits for the step in progress, which a busy machine stretches beyond all limits.
MAX_REFUSAL_STEPS = 4
MAX_P99_RATIO = 1.5


def memory(*, rss_kib_per_min: float = 0.0, shm_kib_per_min: float = 0.0) -> list[Memory]:
    """Ten minutes with the given growth."""
    seconds = np.arange(0, 600, 5)
    return [
        Memory(float(s), int(10**6 + rss_kib_per_min * s / 60), int(shm_kib_per_min * s / 60))
        for s in seconds
    ]


def test_a_slope_is_per_minute_and_ignores_a_spike() -> None:
    at_s = [float(s) for s in range(100)]
    values = [10.0 + 2.0 * s for s in at_s]
    values[50] = 1e9
    assert slope_per_minute(at_s, values) == pytest.approx(120.0)


def failing(samples: list[Memory]) -> set[str]:
    return {check.name for check in memory_checks(samples) if not check.passed}


def test_growth_fails_the_check_and_a_plateau_does_not() -> None:
    assert failing(memory()) == set()
    assert failing(memory(rss_kib_per_min=3000)) == {"RSS does not creep"}
    assert failing(memory(rss_kib_per_min=9000)) == {"RSS does not creep", "RSS flat"}
    assert failing(memory(shm_kib_per_min=2000)) == {"/dev/shm flat"}


def test_one_step_is_no_creep_but_may_be_too_high() -> None:
    def with_step(kib: int) -> list[Memory]:
        samples = memory()
        return [replace(one, rss_kib=one.rss_kib + kib * (one.at_s > 400)) for one in samples]

    assert failing(with_step(20 * 1024)) == set()
    assert failing(with_step(200 * 1024)) == {"RSS flat"}


def test_memory_that_nobody_watched_is_no_proof() -> None:
    assert not any(check.passed for check in memory_checks(memory()[:1]))


@pytest.mark.parametrize("after", [Streams(1, 10, 0), Streams(0, 9, 1)])
def test_a_stream_or_block_that_stays_fails_the_check(after: Streams) -> None:
    before = Streams(0, 10, 0)
    assert all(check.passed for check in leak_checks(before, before))
    assert not all(check.passed for check in leak_checks(before, after))


def test_one_wrong_text_among_many_fails_the_check() -> None:
    outcome = Outcome(num_texts=1000)
    assert all(check.passed for check in text_checks(outcome, Record(), num_clients=21))
    outcome.wrong_texts.append("a.wav: 'B' instead of 'A'")
    assert not all(check.passed for check in text_checks(outcome, Record(), num_clients=21))


def test_a_deadline_miss_is_a_hang() -> None:
    record = Record()
    assert all(check.passed for check in hang_checks(Outcome(), record, unfinished=0))
    record.note("vanish", "DEADLINE_EXCEEDED", expected=("OK",))
    assert record.num_unexpected == 1
    assert not any(check.passed for check in hang_checks(Outcome(), record, unfinished=0))
    assert not any(check.passed for check in hang_checks(Outcome(), Record(), unfinished=1))


@pytest.mark.triton
def test_chaos_leaves_nothing_behind_and_hurts_nobody() -> None:
    report = run_chaos(ChaosSettings(seconds=60.0))
    assert report.failed == [], report.render()


@pytest.mark.triton
def test_ten_thousand_abandoned_streams_come_back_without_traffic() -> None:
    found = open_and_abandon(10_000)
    assert found.num_opened == 10_000
    assert found.active_at_last > 0
    assert found.after == found.before
    assert found.after.active == 0


@pytest.mark.triton
def test_a_flood_is_refused_at_once_and_slows_nobody() -> None:
    found = overload()
    assert not found.admitted_errors
    assert set(found.refusals) == {"UNAVAILABLE"}
    assert all("max_streams" in text for text in found.refusal_texts)
    limit_s = max(MAX_REFUSAL_S, MAX_REFUSAL_STEPS * found.mean_step_s)
    assert np.percentile(found.refusal_s, 99) <= limit_s
    assert found.p99_ratio() <= MAX_P99_RATIO


@pytest.mark.triton
def test_ten_thousand_bad_requests_leave_a_good_stream_its_text() -> None:
    found = bad_requests(10_000)
    assert found.answers == {"INVALID_ARGUMENT": 10_000}
    assert found.text == found.expected_text
    assert found.shm_after_kib == found.shm_before_kib
    assert found.after == found.before
