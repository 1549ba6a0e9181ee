"""A step padded to a captured width gives each real row the bits that it has without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from oasr_backend.engine import Engine
from tests.engine_helpers import STRIDE_SAMPLES, WINDOW_SAMPLES, golden_engine, noise

WIDTHS = (4, 6, 8, 16, 24, 48)


class Stepper:
    """Drives the device step of an engine by hand, one generation a stream."""

    def __init__(self, engine: Engine, num_streams: int) -> None:
        self._engine = engine
        self._caches = engine.caches
        self.generations = list(range(num_streams))
        for generation in self.generations:
            self._caches.open(generation)

    @torch.inference_mode()
    def step(self, windows_BS: Tensor, num_frames: list[int], *, width: int) -> Tensor:
        """(B, T, V) logits of the real rows; rows past them are the padding lane's."""
        self._caches.prepare(self.generations)
        rows_3W = self._caches.row_data(self.generations, num_frames, width=width)
        padded_WS = torch.zeros((width, windows_BS.shape[1]))
        padded_WS[: len(self.generations)] = windows_BS
        padded = self._engine._runner._device_step(padded_WS, torch.from_numpy(rows_3W))
        output = padded.first(len(self.generations))
        self._caches.commit(self.generations, num_frames, output)()
        return output.logits_BTV.clone()


def all_logits(width: int, *, num_streams: int = 4) -> list[Tensor]:
    """Six steps of streams that differ, the last of them partly valid."""
    samples = [noise(seed, seconds=6.0) for seed in range(num_streams)]
    stepper = Stepper(golden_engine(max_streams=64), num_streams)
    logits = []
    for step in range(6):
        begin = step * STRIDE_SAMPLES
        windows = np.stack([s[begin : begin + WINDOW_SAMPLES] for s in samples])
        num_frames = [16 if step < 5 else 3 + row for row in range(num_streams)]
        logits.append(stepper.step(torch.from_numpy(windows), num_frames, width=width))
    return logits


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_padding_changes_no_bit_in_float32_on_the_cpu(width: int) -> None:
    for alone, padded in zip(all_logits(WIDTHS[0]), all_logits(width), strict=True):
        assert torch.equal(alone, padded)
