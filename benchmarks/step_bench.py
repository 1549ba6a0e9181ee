"""One engine's device step at a fixed width, driven outside its loop: advanced, timed, profiled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.floor import full_batch
from benchmarks.models import Model
from oasr_backend.config import ServingConfig
from oasr_backend.kernels import best_tokens
from oasr_backend.models.acoustic_model import ModelOutput
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine

REPEATS = 30
_PROFILED_STEPS = 5


def build_engine(
    model: Model, width: int, *, dtype: str, device: str, settings: dict[str, object] | None = None
) -> Engine:
    """Serves the model with steps of up to `width` streams. `settings` are further flat keys."""
    config = ServingConfig.of(
        dtype=dtype, max_streams=width, max_step_streams=width, **(settings or {})
    )
    return load_engine(model.directory(), config, device=device)


@dataclass(frozen=True)
class Kernel:
    """What the device did under one name, a step."""

    name: str
    calls: float
    us: float


class StepBench:
    """Drives the runner at one width with as many open streams, all with full history."""

    def __init__(self, engine: Engine, width: int) -> None:
        self.runner = engine.parts.runner
        self._store = engine.store
        self._is_gpu = engine.store.device.type == "cuda"
        options = engine.parts.admission.defaults
        self._head = engine.store.decoders.searches[options.decoder].head
        self._slots = [self._store.open(options) for _ in range(width)]
        self.batch = full_batch(engine, self._slots)

    def close(self) -> None:
        for slot in self._slots:
            self._store.close(slot)

    def prepare(self) -> None:
        """Makes room for a chunk of every stream."""
        self._store.prepare(self.batch.rows.slots_B)

    def states(self) -> dict[str, Tensor]:
        """Copies of every declared state of all slots."""
        buffers = self._store.states
        return {name: buffers.buffer_of(name).clone() for name in buffers.specs}

    def restore(self, states: dict[str, Tensor]) -> None:
        for name, rows in states.items():
            self._store.states.buffer_of(name).copy_(rows)

    def decoded(self, output: ModelOutput) -> Tensor:
        """The output of the head that the default search reads."""
        return output.heads[self._head]

    def advance(self) -> None:
        """A whole step with its bookkeeping."""
        self.prepare()
        output = self.runner.forward(self.batch)
        self._store.commit(self.batch.rows, output)()

    def answer(self) -> Tensor:
        """Copy in, step, best tokens and copy out."""
        decoded = self.decoded(self.runner.forward(self.batch))
        # Other heads than CTC's give what the host reads as it is.
        return (best_tokens(decoded) if self._head == "ctc" else decoded).cpu()

    def device_ms(self) -> float:
        """Median time of `answer`, of the device where that is a GPU."""
        return self._median_ms(self.answer)

    def whole_ms(self) -> float:
        """Median time of a whole step, host bookkeeping included."""
        return self._median_ms(self.advance)

    def _median_ms(self, work: Callable[[], object]) -> float:
        timed = _gpu_ms if self._is_gpu else _cpu_ms
        return statistics.median(timed(work) for _ in range(REPEATS))

    def replay_equals_eager(self) -> bool:
        """Bit for bit. The streams are left as they were, but for K/V that is written again."""
        self.prepare()
        before = self.states()
        replayed = self.decoded(self.runner.forward(self.batch)).clone()
        self.restore(before)
        with torch.inference_mode():
            eager = self.decoded(self.runner.forward_eagerly(self.batch))
        self.restore(before)
        return torch.equal(replayed, eager)

    def kernels(self) -> list[Kernel]:
        """Of `answer`, the longest first; operators where there is no GPU."""
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if self._is_gpu else [kinds.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(_PROFILED_STEPS):
                self.answer()
        found = [self._kernel(event) for event in profiler.key_averages()]
        return sorted((one for one in found if one.us > 0), key=lambda one: -one.us)

    def _kernel(self, event: torch.autograd.profiler_util.FunctionEventAvg) -> Kernel:
        if not self._is_gpu:
            us = event.self_cpu_time_total
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            us = event.self_device_time_total
        else:
            us = 0.0  # a call of the host; its kernels have names of their own
        return Kernel(event.key, event.count / _PROFILED_STEPS, us / _PROFILED_STEPS)


def _gpu_ms(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def _cpu_ms(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return (time.perf_counter() - begin_s) * 1e3
