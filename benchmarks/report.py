"""A benchmark's report: one JSON file, and a table on the screen.

{"name", "commit", "date", "machine", "configuration", "figures": [{"name", "unit", "median",
 "min", "max", "repeats", "target"}]}
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS_DIRECTORY = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Figure:
    """One measured quantity with a value for each repeat. The median should reach `target`."""

    name: str
    unit: str
    values: Sequence[float]
    target: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool:
        return self.target is None or self.median >= self.target

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": round(self.median, 4),
            "min": round(min(self.values), 4),
            "max": round(max(self.values), 4),
            "repeats": len(self.values),
            "target": self.target,
        }


@dataclass(frozen=True)
class Report:
    """One benchmark's outcome. `configuration` is JSON-ready: its settings measure it again."""

    name: str
    configuration: Mapping[str, Any]
    figures: Sequence[Figure]

    def figure(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "configuration": dict(self.configuration),
            "figures": [figure.as_json() for figure in self.figures],
        }

    def write(self, folder: Path = RESULTS_DIRECTORY) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        return path

    def show(self, console: Console) -> None:
        table = Table(title=self.name, title_justify="left")
        table.add_column("figure")
        for column in ("median", "min", "max", "unit", "target"):
            table.add_column(column, justify="left" if column == "unit" else "right")
        for figure in self.figures:
            table.add_row(figure.name, *_numbers(figure), figure.unit, _verdict(figure))
        console.print(table)


def alternating_ms(
    ways: Mapping[str, Callable[[], float]],
    *,
    repeats: int,
    warm_up_rounds: int = 1,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of each way, `repeats` of them; a way returns its seconds.

    The rounds of all ways alternate, so that other work of the machine slows each of them
    alike. `prepare` runs before each round, untimed.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warm_up_rounds + repeats):
        prepare()
        for name, way in ways.items():
            elapsed_ms = way() * 1e3
            if number >= warm_up_rounds:
                times_ms[name].append(elapsed_ms)
    return times_ms


def run_alone(measure: Callable[[int], Report], *, description: str | None, repeats: int) -> None:
    """The command line of a benchmark that needs a number of repeats only: show, then write."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report = measure(arguments.repeats)
    report.show(Console())
    report.write()


def commit() -> str:
    """The checked-out commit, `+` behind it when files differ from it; `unknown` outside git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _numbers(figure: Figure) -> list[str]:
    return [f"{value:.4g}" for value in (figure.median, min(figure.values), max(figure.values))]


def _verdict(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return f">= {figure.target:g} {'met' if figure.is_met else 'MISSED'}"


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
