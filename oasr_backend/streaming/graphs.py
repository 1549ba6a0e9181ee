"""CUDA graphs of the whole device step, one for each width of a ladder."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oasr_backend.features.samples import PCM16_SCALE
from oasr_backend.models.acoustic_model import ModelOutput

logger = logging.getLogger(__name__)

#: The device step: (W, S) windows and (4, W) row data to what the model makes of them.
DeviceStep = Callable[[Tensor, Tensor], ModelOutput]
_WARMUP_STEPS = 2


def width_ladder(max_width: int) -> list[int]:
    """Widths 1, 2, 4, 8, 16, 24, 32, 48, ...: padding adds a third at most beyond 8 rows."""
    widths = {max_width}
    power = 1
    while power < max_width:
        widths.add(power)
        if power >= 16 and power * 3 // 2 < max_width:
            widths.add(power * 3 // 2)
        power *= 2
    return sorted(widths)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs of an engine that is gone, freed while another is captured, would end the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class CapturedStep:
    """One width's graph with the buffers that it reads and writes in place."""

    graph: torch.cuda.CUDAGraph
    windows: Tensor
    rows_4W: Tensor
    output: ModelOutput


class GraphRunner:
    """Captures and replays; holds every static tensor. Only this class knows them.

    Graphs share one memory pool, so an output is valid until the next replay of any width.
    Works whichever GPU is current to the thread.
    """

    def __init__(
        self,
        step: DeviceStep,
        *,
        max_width: int,
        window_shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._step = step
        self._device = device
        self._window_shape = window_shape
        self._captured: dict[int, CapturedStep] = {}
        # Where 16-bit windows arrive; a graph reads float32.
        self._pcm16 = torch.empty(0, dtype=torch.int16)
        self.widths = width_ladder(max_width)

    def capture(self, pad_rows_4: Tensor) -> int:
        """Captures every width, widest first, on rows of the padding lane (`pad_rows_4`, (4, 1)).

        Returns the bytes of device memory that the graphs keep. Raises what the device raises.
        """
        with torch.cuda.device(self._device), _no_collection():
            before, _ = torch.cuda.mem_get_info()
            shape = (self.widths[-1], *self._window_shape)
            self._pcm16 = torch.zeros(shape, dtype=torch.int16, device=self._device)
            pool = torch.cuda.graph_pool_handle()
            for width in reversed(self.widths):
                windows = torch.zeros((width, *self._window_shape), device=self._device)
                rows_4W = pad_rows_4.repeat(1, width).contiguous()
                self._captured[width] = self._capture_one(windows, rows_4W, pool)
            torch.cuda.synchronize()
            after, _ = torch.cuda.mem_get_info()
        return before - after

    def discard(self) -> None:
        """Forgets every graph; steps run eagerly from now on."""
        self._captured.clear()

    def width_for(self, num_rows: int) -> int | None:
        """The narrowest captured width that holds `num_rows`; None when there is none."""
        return min((width for width in self._captured if width >= num_rows), default=None)

    def replay(self, windows: Tensor, rows_4W: Tensor) -> ModelOutput:
        """Both on the host, pinned, with as many rows as a captured width. Output aliased.

        Windows are float32, or samples as int16.
        """
        captured = self._captured[windows.shape[0]]
        with torch.cuda.device(self._device):
            if windows.dtype == torch.int16:
                pcm16 = self._pcm16[: windows.shape[0]].copy_(windows, non_blocking=True)
                torch.mul(pcm16, float(PCM16_SCALE), out=captured.windows)
            else:
                captured.windows.copy_(windows, non_blocking=True)
            captured.rows_4W.copy_(rows_4W, non_blocking=True)
            captured.graph.replay()
        return captured.output

    def _capture_one(self, windows: Tensor, rows_4W: Tensor, pool: Any) -> CapturedStep:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Kernels are compiled and libraries pick their algorithms before the capture.
            for _ in range(_WARMUP_STEPS):
                self._step(windows, rows_4W)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._step(windows, rows_4W)
        return CapturedStep(graph, windows, rows_4W, output)
