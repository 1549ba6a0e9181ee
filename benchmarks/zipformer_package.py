"""Compares the engine with the PyPI package `zipformer` on a CPU, by turns.

    python -m benchmarks.zipformer_package --size medium --num-left-chunks 8

Both have the same weights and threads, hear the same clips and search greedily. The engine hears 1,
8 and 32 streams in a closed loop; the package decodes one stream at a time, as its streaming loop
does. It is given the features of whole clips, which are not timed; the engine's time holds
features, buffers and texts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.baseline import engine_text
from benchmarks.engine import ClosedLoop, audio_rate, chosen_engine, measuring_time
from benchmarks.models import (
    RandomModel,
    add_model_arguments,
    add_setting_arguments,
    chosen_model,
    chosen_settings,
)
from benchmarks.peers.packages import MissingPackageError
from benchmarks.report import RESULTS_DIRECTORY, Figure, Report
from benchmarks.workload import CHUNK_S, Options, Utterance, utterances
from benchmarks.zipformer_peer import VERSION, PackageRecogniser
from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.streaming.engine import Engine

STREAM_COUNTS = (1, 8, 32)
_COMPARED_CLIPS = 4
#: TorchScript rewrites a model during its first runs.
_WARM_UP_CLIPS = 2
_WARM_UP_ROUNDS = 2


def run(options: Options, *, is_scripted: bool = True) -> Report:
    """Raises MissingPackageError where the package is not installed."""
    counts = STREAM_COUNTS[:2] if options.quick else STREAM_COUNTS
    engine = chosen_engine(options, num_streams=max(counts))
    cache = engine.config.cache
    directory = options.model.directory()
    package = PackageRecogniser(
        directory,
        chunk_size=cache.chunk_size,
        left_frames=cache.chunk_size * cache.num_left_chunks,
        is_scripted=is_scripted,
    )
    audio = utterances(quick=options.quick)
    clips = [features(engine, clip) for clip in audio]
    for clip in clips[:_WARM_UP_CLIPS]:
        package.tokens(clip)
    num_compared = 1 if options.quick else _COMPARED_CLIPS
    num_equal = _num_equal(engine, package, directory, audio[:num_compared])
    figures = _measure(engine, package, audio, clips, counts=counts, options=options)
    configuration = {
        "checkpoint": options.model.name,
        "package": VERSION,
        "package_is_scripted": is_scripted,
        "threads": options.num_threads,
        "chunk_s": CHUNK_S,
        "chunk_size": cache.chunk_size,
        "num_left_chunks": cache.num_left_chunks,
        "decoder": engine.parts.admission.defaults.decoder,
        "cpu_encoder": engine.config.model.cpu_encoder,
        "utterances_with_equal_text": f"{num_equal} of {num_compared}",
    }
    engine.close()
    return Report("zipformer_package", configuration, figures)


def features(engine: Engine, clip: Utterance) -> Tensor:
    """(T, F) of a whole clip, its edges mirrored as in training."""
    samples_S = np.concatenate(clip)
    mirrored_S = np.concatenate((samples_S[119::-1], samples_S, samples_S[:-201:-1]))
    frontend = engine.parts.model.frontend
    features_TF = frontend.features(torch.from_numpy(mirrored_S)[None])[0]
    return features_TF[: (samples_S.size + 80) // 160]


def _measure(
    engine: Engine,
    package: PackageRecogniser,
    audio: Sequence[Utterance],
    clips: Sequence[Tensor],
    *,
    counts: Sequence[int],
    options: Options,
) -> list[Figure]:
    seconds, _ = measuring_time(options)
    queue = cycle(zip(audio, clips, strict=True))
    theirs: list[float] = []
    ours: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(options.num_repeats):
        for count in counts:
            ours[count].append(_engine_rate(engine, audio, count, seconds))
        theirs.append(_package_rate(package, queue, seconds))
    figures = [Figure("package, one stream at a time", "audio s/s", theirs)]
    for count, rates in ours.items():
        name = f"engine, {count} stream{'s' if count > 1 else ''}"
        ratios = [mine / other for mine, other in zip(rates, theirs, strict=True)]
        figures += [Figure(name, "audio s/s", rates), Figure(f"{name} / package", "x", ratios)]
    return figures


def _engine_rate(
    engine: Engine, audio: Sequence[Utterance], num_streams: int, seconds: float
) -> float:
    """Audio seconds per second of a fresh closed loop; the engine is left without streams."""
    loop = ClosedLoop(engine, audio, num_streams)
    times_s = loop.measure(seconds, warm_up_rounds=_WARM_UP_ROUNDS)
    engine.close()
    return audio_rate(times_s, num_streams)


def _package_rate(
    package: PackageRecogniser, queue: cycle[tuple[Utterance, Tensor]], seconds: float
) -> float:
    """Audio seconds per second over whole clips."""
    audio_s, started_s = 0.0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        clip, features_TF = next(queue)
        package.tokens(features_TF)
        audio_s += len(clip) * CHUNK_S
    return audio_s / (time.perf_counter() - started_s)


def _num_equal(
    engine: Engine, package: PackageRecogniser, directory: Path, audio: Sequence[Utterance]
) -> int:
    """Clips of which both say the same."""
    tokenizer = open_checkpoint(directory).load().tokenizer
    texts = [tokenizer.decode(package.tokens(features(engine, clip))) for clip in audio]
    pairs = zip(texts, [engine_text(engine, clip) for clip in audio], strict=True)
    return sum(theirs == ours for theirs, ours in pairs)


def main(arguments: list[str] | None = None) -> int:
    """Returns 2 when the package is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zipformer_package",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(parser)
    add_setting_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="prove that it runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="the package without TorchScript")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS_DIRECTORY)
    chosen = parser.parse_args(arguments)
    options = Options(
        quick=chosen.quick,
        repeats=chosen.repeats,
        num_threads=chosen.threads,
        model=chosen_model(parser, chosen, RandomModel("zipformer")),
        settings=chosen_settings(chosen),
    )
    console = Console()
    try:
        report = run(options, is_scripted=not chosen.eager)
    except MissingPackageError as error:
        console.print(f"[red]{error}")
        return 2
    report.show(console)
    console.print(f"[dim]written to {report.write(chosen.results)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
