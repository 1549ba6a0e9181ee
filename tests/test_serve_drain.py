from __future__ import annotations

import pytest

from oasr_backend.serve.drain import QUIET_S, Drain

OURS = """
# HELP nv_inference_pending_request_count Requests that wait
nv_inference_request_success{model="asr",version="1"} 7
nv_inference_pending_request_count{model="asr",version="1"} 0
oasr_active_streams{instance="asr_0_0",model="asr"} 3
oasr_heartbeat_seconds{instance="asr_0_0",model="asr"} 90
oasr_step_seconds_count{instance="asr_0_0",model="asr"} 5
nv_cpu_utilization 0.5
"""
WAITING = 'pending_request_count{model="asr",version="1"}'
OPEN = 'oasr_active_streams{instance="asr_0_0",model="asr"}'
FOREIGN = 'nv_inference_pending_request_count{model="other",version="1"} 0\n'


def test_it_is_over_once_nothing_has_counted_for_a_while() -> None:
    drain = Drain(0.0)
    assert not drain.is_over(OURS, 0.1)
    assert not drain.is_over(OURS, 0.05 + QUIET_S)
    assert drain.is_over(OURS, 0.1 + QUIET_S)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('success{model="asr",version="1"} 7', 'success{model="asr",version="1"} 8'),
        ('count{instance="asr_0_0",model="asr"} 5', 'count{instance="asr_0_0",model="asr"} 6'),
    ],
    ids=["an answer", "a step"],
)
def test_whatever_counts_begins_the_wait_anew(old: str, new: str) -> None:
    drain = Drain(0.0)
    drain.is_over(OURS, 0.0)
    assert OURS.count(old) == 1
    later = OURS.replace(old, new)
    assert not drain.is_over(later, QUIET_S)
    assert not drain.is_over(later, 2 * QUIET_S - 0.1)
    assert drain.is_over(later, 2 * QUIET_S)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nv_cpu_utilization 0.5", "nv_cpu_utilization 1"),
        (
            'seconds{instance="asr_0_0",model="asr"} 90',
            'seconds{instance="asr_0_0",model="asr"} 92',
        ),
    ],
    ids=["the machine's load", "a heartbeat"],
)
def test_what_changes_without_work_is_no_activity(old: str, new: str) -> None:
    drain = Drain(0.0)
    drain.is_over(OURS, 0.0)
    assert OURS.count(old) == 1
    assert drain.is_over(OURS.replace(old, new), QUIET_S)


@pytest.mark.parametrize(
    "page",
    [
        "",
        FOREIGN,
        OURS + FOREIGN,
        OURS.replace(f"{WAITING} 0", f"{WAITING} 1"),
        OURS.replace(f"{OPEN} 3", f"{OPEN} 0"),
    ],
    ids=["no metrics", "another kind of model", "both kinds", "a request waits", "no stream"],
)
def test_what_may_still_work_is_waited_for(page: str) -> None:
    drain = Drain(0.0)
    drain.is_over(page, 0.0)
    assert not drain.is_over(page, 1000.0)
