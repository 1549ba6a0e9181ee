"""Runs perf_analyzer against a live server and reads what it reports."""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.get_perf_analyzer import get_perf_analyzer
from oasr_backend.errors import ServerError

PERCENTILES = (50, 90, 95, 99)
_EXTRA_TIME_S = 600


@dataclass(frozen=True)
class Load:
    """One stream count. Closed loop without `chunk_s`: each stream sends when it is answered.

    With it, every stream sends a chunk each `chunk_s` seconds, as live audio does.
    """

    num_streams: int
    seconds: float
    chunk_s: float | None = None

    def flags(self) -> list[str]:
        interval_ms = str(int(self.seconds * 1000))
        flags = ["--measurement-interval", interval_ms, "--stability-percentage", "999",
                 "--max-trials", "3"]  # fmt: skip
        if self.chunk_s is None:
            return [*flags, "--concurrency-range", str(self.num_streams)]
        rate = f"{self.num_streams / self.chunk_s:g}"
        return [*flags, "--request-rate-range", rate, "--num-of-sequences", str(self.num_streams),
                "--serial-sequences"]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Requests per second and latency in ms by percentile, and how many requests failed."""

    requests_per_s: float
    latency_ms: dict[int, float]
    num_requests: int
    num_errors: int


def run_load(grpc_url: str, model: str, load: Load, *, input_data: Path) -> Outcome:
    """Raises ServerError when perf_analyzer fails; failed requests are counted, not raised."""
    with tempfile.TemporaryDirectory(prefix="oasr-perf-") as folder:
        table, export = Path(folder) / "report.csv", Path(folder) / "export.json"
        command = [get_perf_analyzer(), "-m", model, "-i", "grpc", "-u", grpc_url,
                   "--input-data", input_data, "-f", table, "--profile-export-file", export,
                   *load.flags()]  # fmt: skip
        _call([str(part) for part in command], timeout_s=10 * load.seconds + _EXTRA_TIME_S)
        return _outcome(read_table(table), *read_export(export))


def _call(command: Sequence[str], *, timeout_s: float) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"perf_analyzer did not end within {timeout_s:g} s") from error
    if result.returncode != 0:
        output = (result.stdout + result.stderr).strip()[-2000:]
        raise ServerError(f"perf_analyzer ended with status {result.returncode}: {output}")


def read_table(path: Path) -> dict[str, str]:
    """The one row of perf_analyzer's CSV report, by column."""
    with path.open(newline="", encoding="utf-8") as lines:
        row = next(csv.DictReader(lines), None)
    if row is None:
        raise ServerError(f"{path.name} of perf_analyzer holds no measurement")
    return dict(row)


def read_export(path: Path) -> tuple[int, int]:
    """(requests, failed requests) of perf_analyzer's JSON export."""
    document = json.loads(path.read_text(encoding="utf-8"))
    requests: list[dict[str, Any]] = [
        request for experiment in document["experiments"] for request in experiment["requests"]
    ]
    return len(requests), sum(not request["response_timestamps"] for request in requests)


def _outcome(row: dict[str, str], num_requests: int, num_errors: int) -> Outcome:
    latency_ms = {p: float(row[f"p{p} latency"]) / 1000.0 for p in PERCENTILES}
    return Outcome(float(row["Inferences/Second"]), latency_ms, num_requests, num_errors)
