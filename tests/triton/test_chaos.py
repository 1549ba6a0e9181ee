"""Hostile clients against a real server: the short forms of `python -m benchmarks.chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.bad_requests import bad_requests
from benchmarks.chaos.full_house import (
    DEAD_LIMITS,
    LIVING_LIMITS,
    full_of_the_dead,
    full_of_the_living,
)
from benchmarks.chaos.report import rest_checks
from benchmarks.chaos.run import ChaosSettings, run_chaos
from benchmarks.chaos.scenarios import open_and_abandon, overload
from benchmarks.chaos.server import FAULTY_MODEL
from tests.conftest import ROOT
from tests.guards import GUARD_S

pytestmark = pytest.mark.slow

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

#: A refusal waits for the steps in progress, of which a request takes three at once at most.
MAX_REFUSAL_STEPS = 4
#: There are three times as many callers as streams. If the server served them, all would take four
#: times as long.
MAX_SLOWDOWN = 2


def test_chaos_leaves_nothing_behind_and_hurts_nobody() -> None:
    report = run_chaos(ChaosSettings(seconds=60.0))
    assert report.failed == [], report.render()


def test_every_fault_of_a_server_is_found_and_is_the_exit_status(tmp_path: Path) -> None:
    """The faults are those of `faulty_model.py`."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "0.5", "--clients", "24"]
    command += ["--deadline", "10", "--model", str(FAULTY_MODEL)]
    command += ["--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * GUARD_S)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    failed = {check["name"] for check in report["checks"] if not check["passed"]}
    assert failed >= FOUND_IN_FAULTY_SERVER, done.stdout


def test_ten_thousand_abandoned_streams_come_back_without_traffic() -> None:
    found = open_and_abandon(10_000)
    assert found.num_opened == 10_000
    assert found.at_last.active > 0
    assert found.at_last.used_blocks > 0
    assert found.after == found.before
    assert found.after.active == 0


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


def test_a_server_full_of_live_streams_evicts_none_of_them() -> None:
    found = full_of_the_living()
    num_places = LIVING_LIMITS.max_streams
    assert found.seconds >= 3 * LIVING_LIMITS.triton_idle_s
    assert found.longest_request_s > LIVING_LIMITS.triton_idle_s
    assert (len(found.texts), found.wrong_texts) == (num_places, [])
    assert set(found.answers) == {"UNAVAILABLE"}
    assert found.counters == {"opened": num_places + 1, "reaped": 0}
    assert found.after == found.before


def test_a_flood_is_refused_at_once_and_slows_nobody() -> None:
    found = overload()
    assert not found.admitted_errors
    assert set(found.refusals) == {"UNAVAILABLE"}
    assert all("max_streams" in text for text in found.refusal_texts)
    assert found.refusal_steps() <= MAX_REFUSAL_STEPS
    assert found.slowdown() <= MAX_SLOWDOWN


def test_ten_thousand_bad_requests_leave_a_good_stream_its_text() -> None:
    found = bad_requests(10_000)
    assert found.answers == {"INVALID_ARGUMENT": 10_000}
    assert found.text == found.expected_text
    assert found.rest_after.shm_kib == found.rest_before.shm_kib
    rest = rest_checks(found.rest_before, found.rest_after, num_streams=1)
    assert [check for check in rest if not check.passed] == []
    assert found.after == found.before
