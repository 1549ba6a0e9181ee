"""Runs the tests marked `numerics` under several instruction sets and thread counts.

    python -m tests.instruction_sets [environment ...]

Each environment has child processes of its own. They must obey its limits, hear in the demo's
recordings what the first environment heard, and pass the tests. The exit status is 1 otherwise. An
environment beyond what this processor can do is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

from tests.conftest import ROOT
from tests.instruction_sets.environments import ENVIRONMENTS, LEVELS, Environment, Level
from tests.instruction_sets.in_force import Witness, level_of
from tests.same_results import assert_same_results

WITNESS = ("-m", "tests.instruction_sets.witness")
#: The live server has its own process and settings; the client computes nothing.
TESTS = (
    "-m", "pytest", "-q", "-m", "numerics", "-p", "no:cacheprovider",
    "tests", "--ignore=tests/triton", "--ignore=tests/client",
)  # fmt: skip


class DeviationError(Exception):
    """An environment in which something differs from what it should be."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.instruction_sets", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="environment", help="all when none is named")
    names = parser.parse_args(arguments).names or [one.name for one in ENVIRONMENTS]
    if unknown := set(names) - {one.name for one in ENVIRONMENTS}:
        parser.error(f"{sorted(unknown)} are not among {[one.name for one in ENVIRONMENTS]}")
    newest, first, failed = native_level(), None, []
    for environment in (one for one in ENVIRONMENTS if one.name in names):
        if LEVELS.index(environment.aten) > LEVELS.index(newest):
            print(f"{environment.name}: left out, this processor ends at {newest}", flush=True)
            continue
        try:
            first = check(environment, first)
        except DeviationError as deviation:
            failed.append(environment.name)
            print(f"{environment.name}: {deviation}", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def check(environment: Environment, first: Witness | None) -> Witness:
    """Returns `first`, or this environment's witness without it. Raises DeviationError."""
    begin_s = cpu_seconds()
    witness = Witness.from_output(output_of(environment, WITNESS))
    print(f"{environment.name}: {witness}", flush=True)
    if contradictions := list(witness.contradictions(environment)):
        raise DeviationError("; ".join(contradictions))
    first = first or witness
    try:
        assert_same_results(witness.documents, first.documents)
    except AssertionError as difference:
        raise DeviationError(f"hears what others do not:\n{difference}") from difference
    summary = output_of(environment, TESTS).rstrip().rsplit("\n", 1)[-1]
    print(f"{environment.name}: {summary}; {cpu_seconds() - begin_s:.0f} s of CPU", flush=True)
    return first


def native_level() -> Level:
    """The instructions that PyTorch chooses on this processor by itself."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    inherited = {k: v for k, v in os.environ.items() if k != "ATEN_CPU_CAPABILITY"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=inherited, capture_output=True, text=True, check=True
    )
    return level_of(found.stdout)


def output_of(environment: Environment, arguments: tuple[str, ...]) -> str:
    """All that one Python process prints in the environment. Raises DeviationError if it fails."""
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment.process_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if run.returncode:
        raise DeviationError(f"{' '.join(arguments[:4])} ends with {run.returncode}:\n{run.stdout}")
    return run.stdout


def cpu_seconds() -> float:
    """The processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
