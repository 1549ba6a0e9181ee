"""The command line of the chaos run."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from benchmarks.chaos.run import ChaosSettings, run_chaos


def main() -> int:
    """Exit status 0 only if every check holds."""
    settings = ChaosSettings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--deadline", type=float, default=settings.deadline_s, metavar="SECONDS")
    parser.add_argument("--model", type=Path, default=settings.limits.model_py, metavar="MODEL_PY")
    options = parser.parse_args()
    # An ordinary exception unwinds the server and the clients with it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    settings = replace(
        settings,
        seconds=60 * options.minutes,
        num_clients=options.clients,
        seed=options.seed,
        deadline_s=options.deadline,
        limits=replace(settings.limits, model_py=options.model),
    )
    report = run_chaos(settings)
    print(report.render())
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    return 1 if report.failed else 0


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
