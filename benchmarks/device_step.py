"""Times one device step, audio in and tokens out, at several widths, beside what the card allows.

    python -m benchmarks.device_step --widths 1 32 256 1024 --dtype bfloat16
    python -m benchmarks.device_step --family zipformer --size large --num-left-chunks 8 --profile

Replay and eager results of the same rows are compared bit for bit before anything is timed. The
floor is that of floor.py; a card of which it knows nothing needs --bandwidth-tbs and --tflops.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.floor import Card, StepWork, card_of
from benchmarks.models import (
    Model,
    add_model_arguments,
    add_setting_arguments,
    chosen_model,
    chosen_settings,
)
from benchmarks.report import Figure, Report
from benchmarks.step_bench import Kernel, StepBench, build_engine
from oasr_backend.streaming.engine import Engine

_WARM_UP_STEPS = 8


class Floors:
    """The floor of each width, where the card is known."""

    def __init__(self, work: StepWork | None, card: Card | None) -> None:
        self.work, self.card = work, card

    def figures(self, width: int) -> list[Figure]:
        if self.work is None or self.card is None:
            return []
        parts = {
            "floor": self.work.floor_ms,
            "floor of bytes": self.work.bytes_ms,
            "floor of products": self.work.flops_ms,
        }
        return [
            Figure(f"{width} streams: {name}", "ms", [part(self.card, width)])
            for name, part in parts.items()
        ]

    @classmethod
    def of(cls, engine: Engine, model: Model, chosen: argparse.Namespace) -> Floors:
        """Says why where there is none."""
        if engine.store.device.type != "cuda":
            name = "a processor"
        else:
            name = torch.cuda.get_device_name(engine.store.device)
        try:
            card = card_of(
                name, chosen.dtype, bandwidth_tbs=chosen.bandwidth_tbs, tflops=chosen.tflops
            )
        except ValueError as error:
            print(error)
            return cls(None, None)
        return cls(StepWork.of(engine, model.directory()), card)


def measure(engine: Engine, width: int, *, profiles: bool, console: Console) -> list[Figure]:
    """The figures of one width; prints the kernels where they are asked for."""
    bench = StepBench(engine, width)
    for _ in range(_WARM_UP_STEPS):
        bench.advance()
    is_same = bench.replay_equals_eager()
    figures = [
        Figure(f"{width} streams: device", "ms", [bench.device_ms()]),
        Figure(f"{width} streams: whole step", "ms", [bench.whole_ms()]),
        Figure(f"{width} streams: replay equals eager", "", [float(is_same)], target=1.0),
    ]
    if profiles:
        console.print(kernel_table(bench.kernels(), f"{width} streams"))
    bench.close()
    return figures


def kernel_table(kernels: Sequence[Kernel], title: str) -> Table:
    """One line a kernel: calls and microseconds a step, and its share of all."""
    table = Table(title=title, title_justify="left")
    table.add_column("kernel", overflow="fold")
    for column in ("calls", "us", "share"):
        table.add_column(column, justify="right")
    total = sum(kernel.us for kernel in kernels)
    for one in kernels:
        share = f"{one.us / total:.1%}"
        table.add_row(one.name, f"{one.calls:g}", f"{one.us:.1f}", share)
    table.add_row("all", f"{sum(one.calls for one in kernels):g}", f"{total:.1f}", "100%")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_step_arguments(parser)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument(
        "--profile", type=int, nargs="*", metavar="WIDTH",
        help="kernel by kernel, at these widths; without one, at all",
    )  # fmt: skip
    parser.add_argument("--bandwidth-tbs", type=float, help="TB/s of the card's memory")
    parser.add_argument("--tflops", type=float, help="dense teraflops of the card in --dtype")
    parser.add_argument("--results", type=Path, help="folder for device_step.json")
    return parser


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """What is run, and on what."""
    add_model_arguments(parser)
    add_setting_arguments(parser)
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="bfloat16")


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 when a replayed step differs from an eager one."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    model, console = chosen_model(parser, chosen), Console(width=160)
    engine = build_engine(
        model,
        max(chosen.widths),
        dtype=chosen.dtype,
        device=chosen.device,
        settings=chosen_settings(chosen),
    )
    floors = Floors.of(engine, model, chosen)
    profiled = [] if chosen.profile is None else chosen.profile or chosen.widths
    figures: list[Figure] = []
    for width in chosen.widths:
        figures += measure(engine, width, profiles=width in profiled, console=console)
        figures += floors.figures(width)
    report = Report("device_step", configuration_of(model, engine), figures)
    report.show(console)
    if chosen.results is not None:
        report.write(chosen.results)
    return int(not all(figure.is_met for figure in figures))


def configuration_of(model: Model, engine: Engine) -> dict[str, object]:
    """What a report of steps needs to be measured again."""
    config = engine.config
    return {
        "checkpoint": model.name,
        "device": str(engine.store.device),
        "dtype": config.model.dtype,
        "decoder": engine.parts.admission.defaults.decoder,
        "chunk_size": config.cache.chunk_size,
        "num_left_chunks": config.cache.num_left_chunks,
        "state_bytes_per_stream": engine.store.states.nbytes_per_stream,
    }


if __name__ == "__main__":
    raise SystemExit(main())
