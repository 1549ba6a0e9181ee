"""Compares our step with a runtime that joins its streams' lists of states and splits them again.

    python -m benchmarks.slot_runtime --family zipformer --num-left-chunks 8 --dtype float16

Both run the same modules on the same weights and the same windows, in one run and by turns. The
results of their first steps are compared before anything is timed. On a GPU ours is one captured
graph; the other runs operator by operator, as such runtimes do, and, in a second form, with the
model as a graph between the joining and the splitting. On a CPU both run in PyTorch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.device_step import add_step_arguments, configuration_of
from benchmarks.list_runtime import GraphedListRuntime, ListRuntime
from benchmarks.models import Model, RandomModel, chosen_model, chosen_settings
from benchmarks.report import RESULTS_DIRECTORY, Figure, Report, alternating_ms
from benchmarks.step_bench import build_engine
from oasr_backend.features.samples import FLOAT32
from oasr_backend.models.acoustic_model import ModelOutput
from oasr_backend.streaming.batching import StepBatch
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.store import StepRows

STREAMS = 32
#: Longer than the history of the widest cache that is usual, so that all of it has been filled.
COMPARED_STEPS = 20
OURS, OURS_EAGER = "slots", "slots, eager"
LISTS, LISTS_GRAPH, COPIES = "lists, eager", "lists, model as a graph", "lists, copies alone"


class SlotRuntime:
    """Our runner on streams of one engine; on a GPU `step` replays a graph."""

    def __init__(self, engine: Engine, num_streams: int) -> None:
        self._store, self._runner = engine.store, engine.parts.runner
        options = engine.parts.admission.defaults
        self._slots = [self._store.open(options) for _ in range(num_streams)]
        self._rows = StepRows(
            np.array(self._slots),
            np.full(num_streams, self._store.chunk_frames),
            np.full(num_streams, engine.parts.geometry.window_frames),
        )

    def step(self, windows_BS: Tensor) -> ModelOutput:
        return self._runner.forward(self._batch(windows_BS))

    @torch.inference_mode()
    def step_eagerly(self, windows_BS: Tensor) -> ModelOutput:
        return self._runner.forward_eagerly(self._batch(windows_BS))

    def close(self) -> None:
        for slot in self._slots:
            self._store.close(slot)

    def _batch(self, windows_BS: Tensor) -> StepBatch:
        staged_BS = self._runner.next_staging()[FLOAT32][: self._rows.width]
        staged_BS[:] = windows_BS.numpy()
        self._store.prepare(self._rows.slots_B)
        return StepBatch(self._rows, staged_BS)


def largest_difference(
    first: Callable[[Tensor], ModelOutput],
    second: Callable[[Tensor], ModelOutput],
    windows: list[Tensor],
) -> float:
    """Of the encoder's frames, over all steps."""
    most = 0.0
    for windows_BS in windows:
        ours = first(windows_BS).encoded_BTD.float().clone()
        most = max(most, float((ours - second(windows_BS).encoded_BTD.float()).abs().max()))
    return most


def measure(engine: Engine, *, num_streams: int, repeats: int) -> list[Figure]:
    """Raises ValueError for an encoder with attention over paged K/V: that is no declared state."""
    model, device = engine.parts.model, engine.store.device
    if model.spec.attention is not None:
        raise ValueError("the model keeps K/V in paged blocks; give one whose states are all slots")
    is_gpu = device.type == "cuda"
    dtype = getattr(torch, engine.config.model.dtype)
    slots = SlotRuntime(engine, num_streams)
    lists = ListRuntime(model, num_streams, device=device, dtype=dtype)
    windows = _windows(engine, num_streams)
    figures = [
        Figure("encoder frames: largest difference", "", [
            largest_difference(slots.step, lists.step, windows)
        ]),
        Figure("tensors of a stream", "", [float(lists.num_tensors)]),
    ]  # fmt: skip
    steps: dict[str, Callable[[Tensor], object]] = {OURS: slots.step, LISTS: lists.step}
    if is_gpu:
        graphed = GraphedListRuntime(model, num_streams, device=device, dtype=dtype)
        steps |= {OURS_EAGER: slots.step_eagerly, LISTS_GRAPH: graphed.step}
    steps[COPIES] = lambda _: lists.split(lists.join())
    ways = {name: _timed(step, windows[0], is_gpu=is_gpu) for name, step in steps.items()}
    times_ms = alternating_ms(ways, repeats=repeats, warm_up_rounds=5)
    slots.close()
    return figures + _figures(times_ms)


def _figures(times_ms: dict[str, list[float]]) -> list[Figure]:
    figures = [Figure(f"{name}: step", "ms", values) for name, values in times_ms.items()]
    for name in (OURS_EAGER, LISTS, LISTS_GRAPH):
        if name in times_ms:
            pairs = zip(times_ms[name], times_ms[OURS], strict=True)
            ratios = [theirs / ours for theirs, ours in pairs]
            figures.append(Figure(f"{name} / {OURS}", "x", ratios))
    return figures


def _windows(engine: Engine, num_streams: int) -> list[Tensor]:
    """Noise, different in every step."""
    shape = (num_streams, engine.parts.geometry.window_samples)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * 0.05 for _ in range(COMPARED_STEPS)]


def _timed(
    step: Callable[[Tensor], object], windows_BS: Tensor, *, is_gpu: bool
) -> Callable[[], float]:
    """A step's seconds until the device is done."""

    def run() -> float:
        begin_s = time.perf_counter()
        step(windows_BS)
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    return run


def run(
    model: Model, settings: dict[str, object], *, device: str, dtype: str,
    num_streams: int = STREAMS, repeats: int = 30,
) -> Report:  # fmt: skip
    """Raises ValueError as `measure` does."""
    if torch.device(device).type == "cpu":
        settings = {**settings, "cpu_encoder": "pytorch"}
    engine = build_engine(model, num_streams, dtype=dtype, device=device, settings=settings)
    figures = measure(engine, num_streams=num_streams, repeats=repeats)
    configuration = {
        **configuration_of(model, engine),
        "streams": num_streams,
        "compared_steps": COMPARED_STEPS,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    return Report("slot_runtime", configuration, figures)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slot_runtime",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_step_arguments(parser)
    parser.set_defaults(dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS_DIRECTORY)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    try:
        report = run(
            chosen_model(parser, chosen, RandomModel("zipformer")),
            chosen_settings(chosen),
            device=chosen.device,
            dtype=chosen.dtype,
            num_streams=chosen.streams,
            repeats=chosen.repeats,
        )
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    report.show(console)
    console.print(f"[dim]written to {report.write(chosen.results)}")


if __name__ == "__main__":
    main()
