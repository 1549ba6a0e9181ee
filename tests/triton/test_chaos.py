"""Hostile clients against a real server: the short forms of `python -m benchmarks.chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos.behaving import Outcome
from benchmarks.chaos.caller import Record
from benchmarks.chaos.full_house import (
    DEAD_LIMITS,
    LIVING_LIMITS,
    full_of_the_dead,
    full_of_the_living,
)
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
from benchmarks.chaos.run import ChaosSettings, run_chaos
from benchmarks.chaos.scenarios import Overload, bad_requests, open_and_abandon, overload
from benchmarks.chaos.server import FAULTY_MODEL

ROOT = Path(__file__).resolve().parents[2]
FOUND_IN_FAULTY_SERVER = {
    "texts of behaving clients exact",
    "texts of hostile clients exact",
    "hostile clients get the right answer",
    "no hangs",
    "no stream left",
    "all blocks back",
    "room for all streams",
    "RSS of the stub flat",
    "shared memory given back",
    "heap given back",
    "Python objects given back",
}

MAX_REFUSAL_S = 0.1
#: A refusal waits for the step in progress, which a busy machine stretches beyond all limits.
MAX_REFUSAL_STEPS = 4
MAX_P99_RATIO = 1.5


#: Of ten minutes of chaos on a machine that others used as well.
RECORDED = ROOT / "benchmarks" / "results" / "chaos.json"
#: A leak that ten minutes must show.
LEAK_KIB_PER_MIN = 1024
REST = Memory(
    at_s=0.0, server_kib=10**5, stub_kib=10**6, shm_kib=16384, shm_used_kib=60, heap_kib=4 * 10**5,
    python_blocks=6 * 10**5,
)  # fmt: skip


def recorded() -> list[Memory]:
    """A run's samples; the first and the last are at rest."""
    samples = json.loads(RECORDED.read_text(encoding="utf-8"))["memory"]
    return [Memory(**sample) for sample in samples]


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
    samples = recorded()
    assert failing(memory_checks(samples[1:-1])) == set()
    assert failing(rest_checks(samples[0], samples[-1])) == set()


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
    samples = growing(recorded(), name, LEAK_KIB_PER_MIN)
    found = failing([*memory_checks(samples[1:-1]), *rest_checks(samples[0], samples[-1])])
    assert found == {check}


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
    assert failing(rest_checks(REST, REST)) == set()
    assert failing(rest_checks(REST, after)) == {check}


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
    assert found.p99_ratio() == pytest.approx(1.2)
    found.admitted_s[3].extend([2.0] * 10)
    assert found.p99_ratio() == pytest.approx(1.2)
    for phase_s in found.admitted_s[1::2]:
        phase_s.extend([0.2] * 10)
    assert found.p99_ratio() > MAX_P99_RATIO


@pytest.mark.triton
def test_chaos_leaves_nothing_behind_and_hurts_nobody() -> None:
    report = run_chaos(ChaosSettings(seconds=60.0))
    assert report.failed == [], report.render()


@pytest.mark.triton
def test_every_fault_of_a_server_is_found_and_is_the_exit_status(tmp_path: Path) -> None:
    """The faults are those of `faulty_model.py`."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "0.5", "--clients", "24"]
    command += ["--deadline", "10", "--model", str(FAULTY_MODEL)]
    command += ["--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    failed = {check["name"] for check in report["checks"] if not check["passed"]}
    assert failed >= FOUND_IN_FAULTY_SERVER, done.stdout


@pytest.mark.triton
def test_ten_thousand_abandoned_streams_come_back_without_traffic() -> None:
    found = open_and_abandon(10_000)
    assert found.num_opened == 10_000
    assert found.at_last.active > 0
    assert found.at_last.used_blocks > 0
    assert found.after == found.before
    assert found.after.active == 0


@pytest.mark.triton
def test_a_server_full_of_abandoned_streams_lets_new_callers_in_by_eviction() -> None:
    found = full_of_the_dead()
    num_places = DEAD_LIMITS.max_streams
    assert (len(found.texts), found.wrong_texts) == (num_places, [])
    assert set(found.answers) == {"OK", "UNAVAILABLE"}
    assert all("max_streams" in text for text in found.refusal_texts)
    assert DEAD_LIMITS.triton_idle_s <= found.first_admission_s
    assert found.seconds < DEAD_LIMITS.stream_idle_s
    assert found.counters == {"opened": 2 * num_places, "reaped": num_places}
    assert found.after == found.before


@pytest.mark.triton
def test_a_server_full_of_live_streams_evicts_none_of_them() -> None:
    found = full_of_the_living()
    num_places = LIVING_LIMITS.max_streams
    assert found.seconds >= 3 * LIVING_LIMITS.triton_idle_s
    assert found.longest_request_s > LIVING_LIMITS.triton_idle_s
    assert (len(found.texts), found.wrong_texts) == (num_places, [])
    assert set(found.answers) == {"UNAVAILABLE"}
    assert found.counters == {"opened": num_places + 1, "reaped": 0}
    assert found.after == found.before


@pytest.mark.triton
def test_a_flood_is_refused_at_once_and_slows_nobody() -> None:
    found = overload()
    assert not found.admitted_errors
    assert set(found.refusals) == {"UNAVAILABLE"}
    assert all("max_streams" in text for text in found.refusal_texts)
    assert found.refusal_p99_s() <= max(MAX_REFUSAL_S, MAX_REFUSAL_STEPS * found.mean_step_s)
    assert found.p99_ratio() <= MAX_P99_RATIO


@pytest.mark.triton
def test_ten_thousand_bad_requests_leave_a_good_stream_its_text() -> None:
    found = bad_requests(10_000)
    assert found.answers == {"INVALID_ARGUMENT": 10_000}
    assert found.text == found.expected_text
    assert found.rest_after.shm_kib == found.rest_before.shm_kib
    assert failing(rest_checks(found.rest_before, found.rest_after)) == set()
    assert found.after == found.before
