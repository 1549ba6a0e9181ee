"""The chaos program finds leaks, hangs and wrong texts in figures of known runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from benchmarks.chaos.behaving import Outcome
from benchmarks.chaos.caller import Record
from benchmarks.chaos.health import Memory, Streams, slope_per_minute
from benchmarks.chaos.report import (
    Check,
    deed_check,
    hang_checks,
    leak_checks,
    memory_checks,
    rest_checks,
    text_checks,
)
from benchmarks.chaos.scenarios import Overload
from tests.conftest import ROOT

#: The figures are of ten minutes of chaos on a machine that other work used as well.
RECORDED = ROOT / "benchmarks" / "results" / "chaos.json"
#: Ten minutes must show a leak of this size.
LEAK_KIB_PER_MIN = 1024
REST = Memory(
    at_s=0.0, server_kib=10**5, stub_kib=10**6, shm_kib=16384, shm_used_kib=60, heap_kib=4 * 10**5,
    python_blocks=6 * 10**5,
)  # fmt: skip


def recorded() -> tuple[list[Memory], int]:
    """A run's samples, of which the first and the last are at rest, and how many streams it had."""
    report = json.loads(RECORDED.read_text(encoding="utf-8"))
    samples = [Memory(**sample) for sample in report["memory"]]
    return samples, round(report["metrics"]["oasr_streams_opened_total"])


def growing(samples: list[Memory], name: str, kib_per_min: float) -> list[Memory]:
    def grown(one: Memory) -> Memory:
        kib = kib_per_min * (one.at_s - samples[0].at_s) / 60
        return replace(one, **{name: getattr(one, name) + int(kib)})

    return [grown(one) for one in samples]


def test_a_slope_is_per_minute_and_ignores_a_spike() -> None:
    at_s = [float(s) for s in range(100)]
    values = [10.0 + 2.0 * s for s in at_s]
    values[50] = 1e9
    assert slope_per_minute(at_s, values) == pytest.approx(120.0)


def failing(checks: Iterable[Check]) -> set[str]:
    return {check.name for check in checks if not check.passed}


def test_what_a_run_showed_is_no_leak() -> None:
    samples, num_streams = recorded()
    assert failing(memory_checks(samples[1:-1])) == set()
    assert failing(rest_checks(samples[0], samples[-1], num_streams=num_streams)) == set()


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("server_kib", "RSS of the server flat"),
        ("stub_kib", "RSS of the stub flat"),
        ("heap_kib", "heap given back"),
        ("shm_used_kib", "shared memory given back"),
    ],
)
def test_a_leak_of_a_mebibyte_a_minute_is_found_in_what_a_run_showed(name: str, check: str) -> None:
    samples, num_streams = recorded()
    samples = growing(samples, name, LEAK_KIB_PER_MIN)
    at_rest = rest_checks(samples[0], samples[-1], num_streams=num_streams)
    assert failing([*memory_checks(samples[1:-1]), *at_rest]) == {check}


@pytest.mark.parametrize("num_streams", [600, 6000])
def test_what_one_stream_in_thirty_leaves_is_found_in_a_run_of_any_length(num_streams: int) -> None:
    left_kib = 2 * 1024 + 40 * num_streams // 30
    after = replace(REST, heap_kib=REST.heap_kib + left_kib)
    found = failing(rest_checks(REST, after, num_streams=num_streams))
    assert found == {"heap given back"}


def test_regions_that_grow_in_steps_fail_the_check() -> None:
    at_s = [float(s) for s in range(0, 600, 2)]
    samples = [replace(REST, at_s=s, shm_kib=16384 + 8192 * int(s / 100)) for s in at_s]
    assert failing(memory_checks(samples)) == {"/dev/shm flat"}


def test_memory_that_nobody_watched_is_no_proof() -> None:
    assert failing(memory_checks([REST])) == {"memory was watched"}


@pytest.mark.parametrize(
    ("more", "check"),
    [
        ({"shm_used_kib": 1024}, "shared memory given back"),
        ({"heap_kib": 10 * LEAK_KIB_PER_MIN}, "heap given back"),
        ({"python_blocks": 50_000}, "Python objects given back"),
    ],
)
def test_what_is_not_given_back_fails_the_check(more: dict[str, int], check: str) -> None:
    after = replace(REST, **{name: getattr(REST, name) + kib for name, kib in more.items()})
    assert failing(rest_checks(REST, REST, num_streams=6000)) == set()
    assert failing(rest_checks(REST, after, num_streams=6000)) == {check}


def test_an_act_that_never_took_place_fails_the_check() -> None:
    record = Record()
    record.deeds["vanish"] = 3
    assert deed_check(record, ["vanish"]).passed
    assert not deed_check(record, ["vanish", "kill -9"]).passed


@pytest.mark.parametrize("after", [Streams(1, 10, 0), Streams(0, 9, 1)])
def test_a_stream_or_block_that_stays_fails_the_check(after: Streams) -> None:
    before = Streams(0, 10, 0)
    assert all(check.passed for check in leak_checks(before, before))
    assert not all(check.passed for check in leak_checks(before, after))


def test_one_wrong_text_among_many_fails_the_check() -> None:
    outcome = Outcome(texts_by_client=Counter(range(21)))
    assert failing(text_checks(outcome, Record(), num_clients=21)) == set()
    outcome.wrong_texts.append("a.wav: 'B' instead of 'A'")
    wrong = {"texts of behaving clients exact"}
    assert failing(text_checks(outcome, Record(), num_clients=21)) == wrong


def test_one_client_without_any_text_fails_the_check() -> None:
    outcome = Outcome(texts_by_client=Counter(dict.fromkeys(range(20), 50)))
    unserved = {"behaving clients were served"}
    assert failing(text_checks(outcome, Record(), num_clients=21)) == unserved


def test_a_deadline_miss_is_a_hang() -> None:
    record = Record()
    assert all(check.passed for check in hang_checks(Outcome(), record, unfinished=0))
    record.note("vanish", "DEADLINE_EXCEEDED", expected=("OK",))
    assert record.num_unexpected == 1
    assert not any(check.passed for check in hang_checks(Outcome(), record, unfinished=0))
    assert not any(check.passed for check in hang_checks(Outcome(), Record(), unfinished=1))


def test_a_stall_of_the_machine_is_no_harm_by_the_flood_and_lasting_harm_is() -> None:
    found = Overload.of(num_phases=6)
    for number, phase_s in enumerate(found.admitted_s):
        phase_s.extend([0.1 if number % 2 == 0 else 0.12] * 75)
    assert found.slowdown() == pytest.approx(1.2)
    found.admitted_s[3].extend([2.0] * 10)
    assert found.slowdown() == pytest.approx(1.2)
    for phase_s in found.admitted_s[1::2]:
        phase_s.extend([0.3] * 10)
    assert found.slowdown() == pytest.approx(3.0)


def test_a_refusal_is_measured_in_steps() -> None:
    found = Overload.of(num_phases=6)
    found.mean_step_s = 0.05
    for phase_s in found.refusal_s[1::2]:
        phase_s.extend([0.1] * 20 + [9.0])
    assert found.refusal_steps() == pytest.approx(2.0)
