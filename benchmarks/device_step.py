"""Times one device step, audio in and tokens out, at several widths: replayed, eager, profiled.

    python -m benchmarks.device_step --widths 1 32 256 1024 --dtype bfloat16

Replay and eager results of the same rows are compared bit for bit before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.random_checkpoint import write_random_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.features.samples import FLOAT32
from oasr_backend.kernels import best_tokens
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.batching import StepBatch
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.store import StepRows

REPEATS = 30


def build_engine(width: int, dtype: str, device: str) -> Engine:
    directory = write_random_checkpoint(Path(tempfile.mkdtemp()))
    config = ServingConfig.of(dtype=dtype, max_streams=width, max_step_streams=width)
    return load_engine(directory, config, device=device)


class StepBench:
    """Drives the runner at one width with as many open streams, all with full history."""

    def __init__(self, engine: Engine, width: int) -> None:
        self.runner = engine.parts.runner
        self._store = engine.store
        options = engine.parts.admission.defaults
        self._slots = [self._store.open(options) for _ in range(width)]
        generator = np.random.default_rng(0)
        rows = self.runner.next_staging()[FLOAT32][:width]
        rows[:] = generator.standard_normal(rows.shape) * 0.05
        num_frames_B = np.full(width, self._store.chunk_frames)
        num_real_B = np.full(width, engine.parts.geometry.window_frames)
        self.batch = StepBatch(StepRows(np.array(self._slots), num_frames_B, num_real_B), rows)

    def close(self) -> None:
        for slot in self._slots:
            self._store.close(slot)

    def prepare(self) -> None:
        """Makes room for a chunk of every stream."""
        self._store.prepare(self.batch.rows.slots_B)

    @property
    def conv(self) -> torch.Tensor:
        """The convolution's context of all slots."""
        return self._store.states.buffer_of("conv")

    def advance(self) -> torch.Tensor:
        """A whole step with its bookkeeping."""
        self.prepare()
        output = self.runner.forward(self.batch)
        self._store.commit(self.batch.rows, output)()
        return output.heads["ctc"]

    def device_ms(self) -> float:
        """Median device time of copy in, step, greedy and copy out, by events."""
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            best_tokens(self.runner.forward(self.batch).heads["ctc"]).cpu()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def whole_ms(self) -> float:
        """Median wall time of a whole step, host bookkeeping included."""
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.advance()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)


def replay_equals_eager(bench: StepBench) -> bool:
    bench.prepare()
    buffer = bench.conv
    conv = buffer.clone()
    replayed = bench.runner.forward(bench.batch).heads["ctc"].clone()
    buffer.copy_(conv)
    with torch.inference_mode():
        eager = bench.runner.forward_eagerly(bench.batch).heads["ctc"]
    buffer.copy_(conv)
    return torch.equal(replayed, eager)


def profile(bench: StepBench, rows: int = 30) -> str:
    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        ) as profiler,
        torch.inference_mode(),
    ):
        for _ in range(5):
            bench.runner.forward_eagerly(bench.batch)
        torch.cuda.synchronize()
    return str(
        profiler.key_averages().table(
            sort_by="cuda_time_total", row_limit=rows, max_name_column_width=70
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    engine = build_engine(max(arguments.widths), arguments.dtype, "cuda")
    for width in arguments.widths:
        bench = StepBench(engine, width)
        for _ in range(8):
            bench.advance()
        same = replay_equals_eager(bench)
        device_ms, whole_ms = bench.device_ms(), bench.whole_ms()
        print(f"width {width}: device {device_ms:.3f} ms, whole step {whole_ms:.3f} ms")
        print(f"  replay == eager {same}")
        if width in arguments.profile:
            print(profile(bench))
        bench.close()


if __name__ == "__main__":
    main()
