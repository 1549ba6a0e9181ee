"""Measures what options cost: 32 live streams, the same audio, one option set after the other.

The rounds of all sets alternate.

    python -m benchmarks.options [--repeats N] [--threads N]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.engine import WARM_UP_ROUNDS, ClosedLoop
from benchmarks.report import Figure, Report, alternating_ms, run_alone
from benchmarks.workload import DEMO_DIRECTORY, Utterance, utterances
from oasr_backend.config import ServingConfig
from oasr_backend.options import ParameterValue, StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk

STREAMS = 32
#: Prefix beam 10 may cost at most this many times what greedy costs, end to end.
_MOST_FOR_THE_BEAM = 1.5
_BEAM: Mapping[str, ParameterValue] = {"decoder": "prefix_beam"}
_PHRASES = "PROTECTIVE INTELLIGENCE|SECRET SERVICE|COMMISSION|TREASURY|PRESIDENTIAL|ADVANCE"
OPTION_SETS: Mapping[str, Mapping[str, ParameterValue]] = {
    "no options": {},
    "word times, segments": {"word_times": True, "endpoint": True},
    "prefix beam 10": _BEAM,
    "prefix beam 10, 4 best": {**_BEAM, "nbest": 4},
    "prefix beam 10, hotwords": {**_BEAM, "hotwords": _PHRASES},
}


class OptionLoop(ClosedLoop):
    """Every stream asks for the same options, and for RESULT if there are any."""

    def __init__(
        self,
        engine: Engine,
        audio: Sequence[Utterance],
        parameters: Mapping[str, ParameterValue],
    ) -> None:
        super().__init__(engine, audio, STREAMS)
        self._options = StreamOptions.from_parameters(parameters) if parameters else None

    def _next_chunk(self, index: int, slot: object) -> AudioChunk:
        chunk = super()._next_chunk(index, slot)  # type: ignore[arg-type]
        options = self._options if chunk.is_first else None
        return chunk._replace(options=options, wants_result=self._options is not None)


def measure(repeats: int) -> Report:
    audio = utterances(quick=False)
    loops = {
        name: OptionLoop(_engine(), audio, parameters) for name, parameters in OPTION_SETS.items()
    }
    times_ms = alternating_ms(
        {name: loop.round for name, loop in loops.items()},
        repeats=repeats,
        warm_up_rounds=WARM_UP_ROUNDS,
    )
    figures = [Figure(f"{name}: round", "ms", values) for name, values in times_ms.items()]
    figures += [_share(name, times_ms) for name in list(loops)[1:]]
    configuration = {
        "streams": STREAMS,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "options": {name: dict(parameters) for name, parameters in OPTION_SETS.items()},
    }
    return Report("options", configuration, figures)


def _share(name: str, times_ms: Mapping[str, Sequence[float]]) -> Figure:
    """Each round's throughput as a share of that without options."""
    pairs = zip(times_ms["no options"], times_ms[name], strict=True)
    target = 1 / _MOST_FOR_THE_BEAM if name == "prefix beam 10" else None
    shares = [plain / other for plain, other in pairs]
    return Figure(f"{name}: throughput", "of that without options", shares, target)


def _engine() -> Engine:
    return load_engine(DEMO_DIRECTORY, ServingConfig.of(max_streams=STREAMS), device="cpu")


if __name__ == "__main__":
    run_alone(measure, description=__doc__, repeats=40)
