"""Audio seconds per second, and per second of processor time, of both recognisers in process.

No server takes part. All live at once, and work by turns of about a second on the same cores, while
the others sit blocked; so other work of the machine slows each of them alike. Each recogniser comes
in two arrangements, one process a core with one thread, and one process with a thread a core; the
faster one at each number of streams is its figure, and is named.
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
OURS, FP32, INT8 = "ours", "sherpa-onnx fp32", "sherpa-onnx int8"
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
    models = {OURS: None, FP32: exported.fp32, INT8: exported.int8}
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
    best: dict[str, Rates] = {}
    for name in (OURS, FP32, INT8):
        ways = {way: one for (whose, way), one in rates.items() if whose == name}
        way = max(ways, key=lambda way: statistics.median(ways[way].wall))
        best[name] = ways[way]
        outcome.arrangements[f"{where}: {name}"] = way
        outcome.figures.append(Figure(f"{where}: {name}", "audio s/s", best[name].wall))
        outcome.figures.append(Figure(f"{where}: {name}, CPU", "audio s/CPU s", best[name].cpu))
        for other, one in ways.items():
            if other != way:
                outcome.figures.append(Figure(f"{where}: {name}, {other}", "audio s/s", one.wall))
    for name in (FP32, INT8):
        for kind, unit in (("wall", ""), ("cpu", ", CPU")):
            pairs = zip(getattr(best[OURS], kind), getattr(best[name], kind), strict=True)
            ratios = [ours / theirs for ours, theirs in pairs]
            outcome.figures.append(Figure(f"{where}: ours / {name}{unit}", "x", ratios))
