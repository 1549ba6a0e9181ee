"""Runs long on a GPU to see whether a step takes device memory, and how often it waits.

    python -m benchmarks.steady_state --streams 1024 --minutes 10
    python -m benchmarks.steady_state --family zipformer --num-left-chunks 8

Closed loop, as fast as it goes; `--minutes` are those of the audio. Streams begin and end all the
time. The counters are the allocator's own; the waits are those that the profiler sees the CUDA
runtime do. The exit status is 1 if device memory was taken after the warm-up, or if a step waits
for anything but its answer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.device_step import add_step_arguments, configuration_of
from benchmarks.engine import WARM_UP_ROUNDS, ClosedLoop
from benchmarks.models import Model, chosen_model, chosen_settings
from benchmarks.report import Figure, Report
from benchmarks.step_bench import build_engine
from benchmarks.workload import CHUNK_S, CHUNK_SAMPLES, CHUNKS_PER_UTTERANCE, Utterance
from oasr_backend.streaming.engine import Engine

#: The host has waited for the device once one of these calls returns.
WAITS = ("cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize")
_PROFILED_ROUNDS = 20


def noise(count: int) -> list[Utterance]:
    generator = np.random.default_rng(0)
    shape = (CHUNKS_PER_UTTERANCE, CHUNK_SAMPLES)
    return [list(generator.normal(0, 0.05, shape).astype(np.float32)) for _ in range(count)]


def counters() -> dict[str, int]:
    """Device memory taken from the driver so far, and what is in use now."""
    stats = torch.cuda.memory_stats()
    return {
        "device allocations": stats["num_device_alloc"],
        "device frees": stats["num_device_free"],
        "bytes reserved": stats["reserved_bytes.all.current"],
        "bytes in use": stats["allocated_bytes.all.current"],
    }


def waits_of(loop: ClosedLoop, engine: Engine, *, rounds: int) -> tuple[Counter[str], int]:
    """How often the host waited for the device, by call, and in how many steps."""
    steps_before = sum(engine.parts.metrics.step_width.counts)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(rounds):
            loop.round()
    calls = Counter({event.key: event.count for event in profiler.key_averages()})
    # The profiler waits for the device itself, once, when it stops.
    calls["cudaDeviceSynchronize"] -= 1
    waits = Counter({name: calls[name] for name in WAITS if calls[name]})
    return waits, sum(engine.parts.metrics.step_width.counts) - steps_before


def run(model: Model, engine: Engine, *, num_streams: int, minutes: float) -> tuple[Report, bool]:
    """The report, and whether both promises held."""
    loop = ClosedLoop(engine, noise(64), num_streams)
    for _ in range(WARM_UP_ROUNDS):
        loop.round()
    waits, num_steps = waits_of(loop, engine, rounds=_PROFILED_ROUNDS)
    torch.cuda.synchronize()
    before = counters()
    rounds = [loop.round() for _ in range(round(minutes * 60 / CHUNK_S))]
    torch.cuda.synchronize()
    after = counters()
    figures = [
        Figure("round", "ms", [seconds * 1e3 for seconds in rounds]),
        Figure("waits for the device", "per step", [waits.total() / num_steps]),
        *(Figure(f"{name}, change", "", [after[name] - before[name]]) for name in before),
    ]
    configuration = {
        **configuration_of(model, engine),
        "streams": num_streams,
        "audio_minutes": minutes,
        "profiled_steps": num_steps,
        "waits": dict(waits),
        "before": before,
        "after": after,
    }
    is_flat = all(after[name] == before[name] for name in list(before)[:3])
    engine.close()
    return Report("steady_state", configuration, figures), is_flat and waits.total() <= num_steps


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steady_state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_step_arguments(parser)
    parser.set_defaults(dtype="float16")
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--results", type=Path, help="folder for steady_state.json")
    chosen = parser.parse_args()
    model = chosen_model(parser, chosen)
    engine = build_engine(
        model,
        chosen.streams,
        dtype=chosen.dtype,
        device=chosen.device,
        settings=chosen_settings(chosen),
    )
    report, holds = run(model, engine, num_streams=chosen.streams, minutes=chosen.minutes)
    report.show(Console())
    report.write(*([chosen.results] if chosen.results else []))
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
