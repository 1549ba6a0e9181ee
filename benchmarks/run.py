"""Runs the benchmarks, shows a table for each and writes benchmarks/results/NAME.json.

python -m benchmarks.run [--device cpu|cuda] [--only NAME] [--quick]
python -m benchmarks.run --only engine --family zipformer --num-left-chunks 8
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks import baseline, engine, host, server
from benchmarks.models import (
    add_model_arguments,
    add_setting_arguments,
    chosen_model,
    chosen_settings,
)
from benchmarks.report import RESULTS_DIRECTORY, Report
from benchmarks.workload import DEMO, Options

BENCHMARKS: dict[str, Callable[[Options], Report]] = {
    "engine": engine.run,
    "baseline": baseline.run,
    "host": host.run,
    "server": server.run,
}
#: What measures other models than the demo's too.
_ANY_MODEL = ("engine", "server")


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 when a figure misses its target and the run was not a quick one."""
    options, names = _parse(arguments)
    console = Console()
    missed = []
    for name in names:
        console.print(f"[dim]measuring {name} on {options.device} ...")
        report = _named(BENCHMARKS[name](options), options)
        report.show(console)
        console.print(f"[dim]written to {report.write(options.results)}")
        missed += [figure.name for figure in report.figures if not figure.is_met]
    return int(bool(missed) and not options.quick)


def _named(report: Report, options: Options) -> Report:
    """GPU results stand beside those of the CPU."""
    if options.device == "cpu":
        return report
    return replace(report, name=f"{report.name}-{options.device.partition(':')[0]}")


def _parse(arguments: list[str] | None) -> tuple[Options, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    add_model_arguments(parser)
    add_setting_arguments(parser)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--only", action="append", choices=list(BENCHMARKS), metavar="NAME",
                        help=f"one of {', '.join(BENCHMARKS)}; may be repeated")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="prove that it runs, in seconds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="torch threads on the CPU")
    parser.add_argument("--results", type=Path, default=RESULTS_DIRECTORY)
    chosen = parser.parse_args(arguments)
    options = Options(
        device=chosen.device,
        quick=chosen.quick,
        repeats=chosen.repeats,
        num_threads=chosen.threads,
        results=chosen.results,
        model=chosen_model(parser, chosen, DEMO),
        settings=chosen_settings(chosen),
    )
    is_demo = options.model is DEMO and not options.settings
    names = chosen.only or list(BENCHMARKS if is_demo else _ANY_MODEL)
    if not is_demo and not set(names) <= set(_ANY_MODEL):
        parser.error(f"another model or setting is for {' and '.join(_ANY_MODEL)} alone")
    return options, names


if __name__ == "__main__":
    raise SystemExit(main())
