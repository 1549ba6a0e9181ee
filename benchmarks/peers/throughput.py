"""Audio seconds per second, and per second of processor time, of both recognisers in process.

No server takes part. All live at once, and work by turns of about a second on the same cores, while
the others sit blocked; so other work of the machine slows each of them alike. Each recogniser comes
in two arrangements, one process a core with one thread, and one process with a thread a core. At
each number of streams the better one is its figure, and is named: the faster one for the rate, and
the thriftier one for the rate of processor time.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.choices import Choices
from benchmarks.peers.export import ExportedModel
from benchmarks.peers.workers import Crew, Plan, Turn
from benchmarks.report import Figure

PROCESSES, THREADS = "a process a core", "one process"
OURS = "ours"
#: Threads of the last turn may spin for a moment before they sleep.
_REST_S = 0.03


@dataclass
class Rates:
    """Of one crew at one number of streams, a value for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, turns: Sequence[Turn]) -> None:
        """Processes of a crew end their last rounds at different times, so each has its rate."""
        self.wall.append(sum(turn.audio_s / turn.wall_s for turn in turns))
        audio_s = sum(turn.audio_s for turn in turns)
        self.cpu.append(audio_s / sum(turn.cpu_s for turn in turns))


@dataclass(frozen=True)
class Outcome:
    """The figures, and the arrangement that each of them comes from."""

    figures: list[Figure]
    arrangements: dict[str, str]


def measure(exported: ExportedModel, choices: Choices) -> Outcome:
    """Raises WorkerError when a process fails."""
    outcome = Outcome([], {})
    with _crews(exported, choices) as crews:
        for num_streams in choices.streams:
            rates = _by_turns(crews, num_streams, choices)
            _add_figures(outcome, rates, num_streams)
    return outcome


@contextlib.contextmanager
def _crews(exported: ExportedModel, choices: Choices) -> Iterator[Mapping[tuple[str, str], Crew]]:
    """Ready crews by recogniser and arrangement; they end with the block."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    arrangements = {PROCESSES: [(core,) for core in cores]}
    if len(cores) > 1:
        arrangements[THREADS] = [cores]
    models = {OURS: None, **exported.models()}
    with contextlib.ExitStack() as stack:
        crews = {}
        for name, model in models.items():
            for arrangement, shares in arrangements.items():
                plans = [
                    Plan(exported, model, share, max(choices.streams), choices.is_quick)
                    for share in shares
                ]
                crews[name, arrangement] = stack.enter_context(Crew(plans))
        for crew in crews.values():
            crew.wait_ready()
        yield crews


def _by_turns(
    crews: Mapping[tuple[str, str], Crew], num_streams: int, choices: Choices
) -> dict[tuple[str, str], Rates]:
    """Each round begins with another crew, so that none always follows the same one."""
    for crew in crews.values():
        crew.prepare(num_streams)
    order = list(crews)
    rates = {key: Rates() for key in order}
    for _ in range(choices.num_rounds):
        for key in order:
            time.sleep(_REST_S)
            rates[key].add(crews[key].turn(choices.turn_s))
        order = order[1:] + order[:1]
    return rates


def _add_figures(
    outcome: Outcome, rates: Mapping[tuple[str, str], Rates], num_streams: int
) -> None:
    where = f"{num_streams} stream" + ("s" if num_streams > 1 else "")
    ours = Rates()
    for name in dict.fromkeys(name for name, _ in rates):
        ways = {way: one for (whose, way), one in rates.items() if whose == name}
        by_wall = max(ways, key=lambda way: statistics.median(ways[way].wall))
        by_cpu = max(ways, key=lambda way: statistics.median(ways[way].cpu))
        outcome.arrangements[f"{where}: {name}"] = by_wall
        outcome.arrangements[f"{where}: {name}, CPU"] = by_cpu
        best = Rates(ways[by_wall].wall, ways[by_cpu].cpu)
        outcome.figures.extend(_rate_figures(f"{where}: {name}", best))
        if name == OURS:
            ours = best
        else:
            outcome.figures.extend(_ratio_figures(f"{where}: {name}", ours, best))
        for way, one in ways.items():
            outcome.figures.extend(_rate_figures(f"{where}: {name}, {way}", one))


def _rate_figures(name: str, rates: Rates) -> list[Figure]:
    return [
        Figure(name, "audio s/s", rates.wall),
        Figure(f"{name}, CPU", "audio s/CPU s", rates.cpu),
    ]


def _ratio_figures(name: str, ours: Rates, theirs: Rates) -> list[Figure]:
    """A ratio for each round, whose turns lie close together."""

    def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
        return [one / other for one, other in zip(ours, theirs, strict=True)]

    return [
        Figure(f"{name}, ours / this", "x", ratios(ours.wall, theirs.wall)),
        Figure(f"{name}, ours / this, CPU", "x", ratios(ours.cpu, theirs.cpu)),
    ]
