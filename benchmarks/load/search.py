"""The largest number of streams that a server holds within a latency limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]

#: Below this share of the intended audio the server (or the client) falls behind.
MIN_REACHED = 0.98
#: A client that sends this late itself cannot judge a server.
MAX_CLIENT_SLIP_MS = 20.0


@dataclass(frozen=True)
class Limits:
    p95_ms: float
    tolerance: float = 0.05


def failures(report: Report, limits: Limits) -> list[str]:
    """The reasons why a run does not hold; empty when it does."""
    final, throughput = report["latency_ms"]["last_chunk_to_final"], report["throughput"]
    found = []
    if not final["count"]:
        found.append("no utterance ended in the window; measure for longer")
    elif final["p95"] > limits.p95_ms:
        found.append(f"last-chunk-to-final p95 {final['p95']} ms > {limits.p95_ms:g} ms")
    if report["errors"]:
        found.append(f"errors {report['errors']}")
    if report["texts"]["wrong"]:
        found.append(f"{report['texts']['wrong']} wrong texts")
    reached = throughput["reached_audio_s_per_s"] / throughput["intended_audio_s_per_s"]
    if reached < MIN_REACHED:
        found.append(f"only {reached:.1%} of the audio was answered in time")
    slip = report["client"]["schedule_slip_ms"].get("p99", 0.0)
    if slip > MAX_CLIENT_SLIP_MS:
        found.append(f"the client itself lags: slip p99 {slip} ms; use more --processes")
    return found


def find_max(
    run: Callable[[int], Report], limits: Limits, *, first: int, ceiling: int
) -> tuple[int, list[Report]]:
    """Doubles from `first` until a run fails, then halves the gap down to the tolerance.

    Returns the largest number that held, 0 if none did, and the reports of all runs, each with
    its `failures`.
    """
    reports: list[Report] = []

    def holds(num_streams: int) -> bool:
        report = run(num_streams)
        report["failures"] = failures(report, limits)
        reports.append(report)
        return not report["failures"]

    good, bad, trial = 0, None, min(first, ceiling)
    while bad is None or bad - good > max(1, limits.tolerance * bad):
        if holds(trial):
            good = trial
        else:
            bad = trial
        if good == ceiling or bad == 1:
            break
        trial = min(2 * good, ceiling) if bad is None else (good + bad) // 2
    return good, reports
