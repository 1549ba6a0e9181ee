"""Device work of one step: windows in, what the model makes of them out."""

from __future__ import annotations

import logging
from collections import deque

import numpy as np
import torch
from torch import Tensor

from oasr_backend.device import reserved_zeros, to_device
from oasr_backend.features.samples import FLOAT32, PCM16, PCM16_SCALE
from oasr_backend.models.acoustic_model import AcousticModel, ModelOutput
from oasr_backend.streaming.batching import Staging, StepBatch
from oasr_backend.streaming.graphs import GraphRunner
from oasr_backend.streaming.store import NO_ROWS, StepRows, StreamStore

logger = logging.getLogger(__name__)


#: What CUDA says when every later call on the device will fail too.
_LOST_SIGNS = (
    "CUDA error",
    "device-side assert",
    "CUBLAS_STATUS",
    "CUDNN_STATUS",
    "unspecified launch",
)


def is_device_lost(error: BaseException) -> bool:
    """Whether the device, not this step, is at fault. Running out of memory is not."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_SIGNS)


class _StagingBlock:
    """Host memory for what one batch sends to the device, pinned where that is a GPU.

    The same memory serves either type of samples, since a batch has one.
    """

    def __init__(self, window_shape: tuple[int, ...], *, is_pinned: bool) -> None:
        floats = (
            torch.zeros(window_shape, pin_memory=True)
            if is_pinned
            else reserved_zeros(window_shape, dtype=torch.float32, device=torch.device("cpu"))
        )
        codes = floats.view(torch.int16).flatten()[: floats.numel()].view(window_shape)
        self.windows = {FLOAT32: floats, PCM16: codes}
        self.arrays: Staging = {FLOAT32: floats.numpy(), PCM16: codes.numpy()}
        self._rows = torch.zeros(4 * window_shape[0], dtype=torch.int64, pin_memory=is_pinned)

    # The name carries its shape.
    def rows_4W(self, width: int) -> Tensor:  # noqa: N802
        """Contiguous: a strided copy would go through pageable memory and wait for the device."""
        return self._rows[: 4 * width].view(4, width)


class EncoderRunner:
    """Runs batches on the device. Anything that touches the model happens here.

    Windows are written into rows of `next_staging()`, then `forward` takes them from there. Each
    lane has two blocks that take turns, so that one batch can be got ready while the device still
    reads the other. Lanes call `forward` at the same time; graphs serve lane 0 alone.
    """

    #: Batches that may be launched and not yet landed: each has a staging block.
    MOST_AHEAD = 2

    def __init__(
        self,
        model: AcousticModel,
        store: StreamStore,
        *,
        window_shape: tuple[int, ...],
        num_lanes: int = 1,
    ) -> None:
        """`window_shape`: (max_step_streams, samples), or (..., frames, mel bins) for features.

        `runs_ahead` says whether `forward` returns before the device is done.
        """
        self._model = model
        self._store = store
        self._window_shape = window_shape
        is_pinned = self.runs_ahead = store.device.type == "cuda"
        self._blocks = [
            deque(_StagingBlock(window_shape, is_pinned=is_pinned) for _ in range(self.MOST_AHEAD))
            for _ in range(num_lanes)
        ]
        self._graphs: GraphRunner | None = None

    def next_staging(self, lane: int = 0) -> Staging:
        """Rows (max_step_streams, ...) for the windows of a lane's next batch, by their type."""
        blocks = self._blocks[lane]
        blocks.rotate()
        return blocks[0].arrays

    def capture(self) -> None:
        """Captures the step for a ladder of widths; on failure says so and stays eager.

        Unlimited history has no fixed extent, so it is not captured.
        """
        if self._store.device.type != "cuda" or not self._store.has_bounded_history:
            return
        max_width, *window_shape = self._window_shape
        graphs = GraphRunner(
            self.device_step,
            max_width=max_width,
            window_shape=tuple(window_shape),
            device=self._store.device,
        )
        pad_rows = torch.empty((4, 1), dtype=torch.int64)
        self._store.write_row_data(NO_ROWS, pad_rows.numpy())
        try:
            with torch.inference_mode():
                num_bytes = graphs.capture(pad_rows.to(self._store.device))
        except RuntimeError as error:
            logger.error("event=capture_failed steps run eagerly, slower", exc_info=error)
            return
        self._graphs = graphs
        logger.info("event=captured widths=%s mib=%d", graphs.widths, num_bytes >> 20)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> ModelOutput:
        """What the model makes of the batch's rows, valid until the next call.

        Without graphs a batch that does not fit into memory is run in halves; raises whatever the
        device raises when one row alone does not fit.
        """
        width = self._graphs.width_for(batch.width) if self._graphs else None
        if width is not None:
            return self._replay(batch, width)
        try:
            return self.forward_eagerly(batch)
        except torch.OutOfMemoryError:
            if batch.width == 1:
                raise
            logger.warning("event=out_of_memory streams=%d: trying halves", batch.width)
            return ModelOutput.cat([self.forward(half) for half in batch.halves()])

    def device_step(
        self, windows: Tensor, rows_4W: Tensor, *, history_frames: int | None = None
    ) -> ModelOutput:
        """The whole of a step's device work; tensors only, so that it can be captured.

        `history_frames` bounds what any row sees of its past; None: all that a row can see.
        """
        if history_frames is None:
            history_frames = self._store.most_history_frames
        caches = self._store.encoder_caches(rows_4W, history_frames=history_frames)
        if windows.dim() == 2:
            return self._model.forward_audio(windows, caches, rows_4W[3])
        return self._model.forward_features(windows, caches, rows_4W[3])

    def _replay(self, batch: StepBatch, width: int) -> ModelOutput:
        assert self._graphs is not None
        block = self._blocks[0][0]
        rows_4W = block.rows_4W(width)
        self._store.write_row_data(batch.rows, rows_4W.numpy())
        output = self._graphs.replay(block.windows[batch.windows.dtype][:width], rows_4W)
        return output.first(batch.width)

    def forward_eagerly(self, batch: StepBatch) -> ModelOutput:
        """`forward` without a graph, all rows at once. Call it in inference mode."""
        windows = torch.from_numpy(batch.windows).to(self._store.device, non_blocking=True)
        if windows.dtype == torch.int16:
            windows = windows * float(PCM16_SCALE)
        rows_4B = np.empty((4, batch.width), dtype=np.int64)
        self._store.write_row_data(batch.rows, rows_4B)
        bound = self._history_bound(batch.rows)
        rows_4B_there = to_device(rows_4B, self._store.device)
        return self.device_step(windows, rows_4B_there, history_frames=bound)

    def _history_bound(self, rows: StepRows) -> int:
        """A constant on a GPU, where shapes are dear; the true maximum on a CPU."""
        if self._store.device.type == "cuda" and self._store.has_bounded_history:
            return self._store.most_history_frames
        return self._store.history_frames(rows.slots_B)
