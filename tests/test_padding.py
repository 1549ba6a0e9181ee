"""A step padded to a captured width gives each real row what it has without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.store import StepRows
from tests.engine_helpers import STRIDE_SAMPLES, WINDOW_SAMPLES, golden_engine, noise
from tests.same_results import TOLERANCE

pytestmark = pytest.mark.numerics

WIDTHS = (4, 6, 8, 16, 24, 48)


class Stepper:
    """Drives the device step of an engine by hand, one slot a stream."""

    def __init__(self, engine: Engine, num_streams: int, lane_S: Tensor) -> None:
        """`lane_S` is the window that every row of padding holds."""
        self._engine = engine
        self._store = engine.store
        self._lane_S = lane_S
        options = engine.parts.admission.defaults
        self.slots_B = np.array([self._store.open(options) for _ in range(num_streams)])

    @torch.inference_mode()
    def step(self, windows_BS: Tensor, num_frames: list[int], *, width: int) -> Tensor:
        """(B, T, V) logits of the real rows; rows past them are the padding lane's."""
        rows = StepRows(self.slots_B, np.array(num_frames), np.full(len(num_frames), 67))
        self._store.prepare(rows.slots_B)
        rows_4W = np.empty((4, width), dtype=np.int64)
        self._store.write_row_data(rows, rows_4W)
        padded_WS = self._lane_S.repeat(width, 1)
        padded_WS[: rows.width] = windows_BS
        padded = self._engine.parts.runner.device_step(padded_WS, torch.from_numpy(rows_4W))
        output = padded.first(rows.width)
        self._store.commit(rows, output)()
        return output.heads["ctc"].clone()


def all_logits(width: int, *, lane_S: Tensor | None = None, num_streams: int = 4) -> Tensor:
    """(6, B, T, V): six steps of streams that differ, the last of them partly valid."""
    samples = [noise(seed, seconds=6.0) for seed in range(num_streams)]
    silence_S = torch.zeros(WINDOW_SAMPLES)
    engine = golden_engine(max_streams=64)
    stepper = Stepper(engine, num_streams, silence_S if lane_S is None else lane_S)
    logits = []
    for step in range(6):
        begin = step * STRIDE_SAMPLES
        windows = np.stack([s[begin : begin + WINDOW_SAMPLES] for s in samples])
        num_frames = [16 if step < 5 else 3 + row for row in range(num_streams)]
        logits.append(stepper.step(torch.from_numpy(windows), num_frames, width=width))
    return torch.stack(logits)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_padding_changes_log_probs_in_their_last_digits_alone(width: int) -> None:
    """Another width may take another matrix kernel, which adds in another order."""
    alone, padded = (all_logits(w).log_softmax(-1) for w in (WIDTHS[0], width))
    torch.testing.assert_close(padded, alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_what_the_padding_holds_changes_no_bit(width: int) -> None:
    """The same kernels run on the same shapes, so any difference shows a row that leaks."""
    loud_S = torch.from_numpy(noise(9, seconds=1.0)[:WINDOW_SAMPLES])
    assert torch.equal(all_logits(width), all_logits(width, lane_S=loud_S))
