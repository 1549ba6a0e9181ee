"""Checks one stream of hours: memory stays flat, and its last minutes are heard as its first.

    OMP_NUM_THREADS=1 python -m benchmarks.long_stream --hours 2

The demo model's evaluation clips make a lap that ends in silence. The stream plays the lap again
and again, faster than real time, so that every window of the transcript has the same words. Any
other model may hear them (--checkpoint or --family): what it says should not change either.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jiwer
import numpy as np
import torch
from rich.console import Console

from benchmarks.models import (
    Model,
    add_model_arguments,
    add_setting_arguments,
    chosen_model,
    chosen_settings,
)
from benchmarks.report import RESULTS_DIRECTORY, Figure, Report
from benchmarks.workload import (
    CHUNK_SAMPLES,
    DEMO,
    DEMO_DIRECTORY,
    SAMPLE_RATE,
    FloatArray,
    read_audio,
)
from oasr_backend.config import CacheSettings, ServingConfig
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk

#: The silence is longer than a window, so a lap's last word is out before the next lap begins.
_SILENCE_S = 1.5
#: The stream's transcript itself takes about 2 MiB an hour.
MOST_GROWTH_MIB = 16.0
MOST_WER_CHANGE = 0.01
_STREAM_ID = "long"


@dataclass(frozen=True)
class Lap:
    """Joined clips and their reference text."""

    samples_S: FloatArray
    text: str


@dataclass(frozen=True)
class LapResult:
    """One lap as it was heard; memory and blocks as they were while it played.

    `num_rebases` is None where the encoder has no K/V, so that no position grows.
    """

    word_error_rate: float
    resident_mib: float
    block_counts: frozenset[int]
    num_rebases: int | None
    seconds: float


def make_lap(lap_s: float) -> Lap:
    """As many evaluation clips as fit, from the first again after the last, then silence."""
    folder = DEMO_DIRECTORY / "eval"
    entries = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    samples_S = np.zeros(round(lap_s * SAMPLE_RATE), dtype=np.float32)
    texts: list[str] = []
    used = 0
    for entry in itertools.cycle(entries):
        clip_S = read_audio(folder / entry["audio"])
        if used + clip_S.size > samples_S.size - _SILENCE_S * SAMPLE_RATE:
            return Lap(samples_S, " ".join(texts))
        samples_S[used : used + clip_S.size] = clip_S
        used += clip_S.size
        texts.append(entry["text"])
    raise AssertionError("the cycle has no end")


def resident_mib() -> float:
    """Memory of this process, from /proc."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class LongStream:
    """A stream that plays one lap after the other, 640 ms a request, and never ends."""

    def __init__(self, engine: Engine, lap: Lap) -> None:
        self._engine = engine
        self._lap = lap
        self._text = ""
        self._is_open = False
        self._position = 0

    def play_lap(self) -> LapResult:
        """Raises the stream's error."""
        begin_s, heard = time.perf_counter(), len(self._text)
        block_counts: set[int] = set()
        num_rebases = 0
        for start in range(0, self._lap.samples_S.size, CHUNK_SAMPLES):
            self._send(self._lap.samples_S[start : start + CHUNK_SAMPLES])
            block_counts.add(self._blocks_in_use())
            num_rebases += self._has_rebased()
        return LapResult(
            word_error_rate=float(jiwer.wer(self._lap.text, self._text[heard:].strip())),
            resident_mib=resident_mib(),
            block_counts=frozenset(block_counts),
            num_rebases=None if self._engine.store.kv is None else num_rebases,
            seconds=time.perf_counter() - begin_s,
        )

    def _send(self, samples_S: FloatArray) -> None:
        (result,) = self._engine.process(
            [AudioChunk(_STREAM_ID, samples_S, is_first=not self._is_open)]
        )
        if result.error is not None:
            raise result.error
        self._is_open = True
        self._text = result.text

    def _blocks_in_use(self) -> int:
        if self._engine.store.kv is None:
            return 0
        pool = self._engine.store.kv.pool
        return pool.num_blocks - pool.num_free_blocks

    def _has_rebased(self) -> bool:
        if self._engine.store.kv is None:
            return False
        (stream,) = self._engine.streams
        before = self._position
        (self._position,) = self._engine.store.kv.position_offsets(np.array([stream.slot]))
        return self._position < before


def play(
    config: ServingConfig, *, lap_s: float, num_laps: int, model: Model = DEMO
) -> list[LapResult]:
    """Plays one stream on the CPU."""
    engine = load_engine(model.directory(), config, device="cpu")
    stream = LongStream(engine, make_lap(lap_s))
    laps = [stream.play_lap() for _ in range(num_laps)]
    engine.check_integrity()
    engine.close()
    return laps


def complaints(laps: Sequence[LapResult]) -> list[str]:
    """The faults, in words. Laps after the first have a full history."""
    found = []
    change = laps[-1].word_error_rate - laps[0].word_error_rate
    if abs(change) > MOST_WER_CHANGE:
        found.append(f"the word error rate moved by {change:+.4f} from the first lap to the last")
    growth_mib = max(lap.resident_mib for lap in laps[1:]) - laps[0].resident_mib
    if growth_mib > MOST_GROWTH_MIB:
        found.append(f"memory grew by {growth_mib:.1f} MiB after the first lap")
    held = frozenset[int]().union(*(lap.block_counts for lap in laps[1:]))
    if len(held) != 1:
        found.append(f"the number of blocks held varies: {sorted(held)}")
    if sum(1 if lap.num_rebases is None else lap.num_rebases for lap in laps) == 0:
        found.append("positions were never re-based: play longer or lower position_limit_frames")
    return found


def run(
    hours: float, *, lap_s: float, config: ServingConfig, model: Model = DEMO
) -> tuple[Report, list[str]]:
    laps = play(config, lap_s=lap_s, num_laps=round(hours * 3600 / lap_s), model=model)
    configuration = {
        "checkpoint": model.name,
        "hours": hours,
        "lap_s": lap_s,
        "threads": torch.get_num_threads(),
        "chunk_size": config.cache.chunk_size,
        "num_left_chunks": config.cache.num_left_chunks,
        "position_limit_frames": config.cache.position_limit_frames,
    }
    return Report("long_stream", configuration, _figures(laps)), complaints(laps)


def _figures(laps: Sequence[LapResult]) -> list[Figure]:
    held = [float(count) for lap in laps[1:] for count in sorted(lap.block_counts)]
    figures = [
        Figure("blocks held after the first lap", "blocks", held),
        Figure("re-bases a lap", "times", [float(lap.num_rebases or 0) for lap in laps]),
        Figure("time a lap", "s", [lap.seconds for lap in laps]),
    ]
    for number, lap in enumerate(laps, start=1):
        figures += [
            Figure(f"lap {number}: word error rate", "%", [lap.word_error_rate * 100]),
            Figure(f"lap {number}: resident memory", "MiB", [lap.resident_mib]),
        ]
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 when the stream gets worse or bigger with time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_stream", description=__doc__)
    add_model_arguments(parser)
    add_setting_arguments(parser)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--lap-minutes", type=float, default=10.0)
    parser.add_argument("--position-limit", type=int, default=CacheSettings.position_limit_frames)
    parser.add_argument("--results", type=Path, default=RESULTS_DIRECTORY)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = ServingConfig.of(
        max_streams=1, position_limit_frames=chosen.position_limit, **chosen_settings(chosen)
    )
    report, found = run(
        chosen.hours,
        lap_s=chosen.lap_minutes * 60,
        config=config,
        model=chosen_model(parser, chosen, DEMO),
    )
    console = Console()
    report.show(console)
    console.print(f"[dim]written to {report.write(chosen.results)}")
    for complaint in found:
        console.print(f"[red]{complaint}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
