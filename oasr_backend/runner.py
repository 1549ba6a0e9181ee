"""Device work of one step: windows in, log-probabilities out."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_backend.acoustic_model import AcousticModel
from oasr_backend.batching import StepBatch
from oasr_backend.stream_caches import StreamCaches

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


class EncoderRunner:
    """Runs batches on the device. Anything that touches the model happens here.

    `staging` (max_step_streams, S) receives the step's windows; it is pinned where the device is a
    GPU, so that one asynchronous copy brings all of them over.
    """

    def __init__(
        self, model: AcousticModel, caches: StreamCaches, *, window_shape: tuple[int, ...]
    ) -> None:
        self._model = model
        self._caches = caches
        self._device = caches.config.device
        self._staging = torch.zeros(window_shape, pin_memory=self._device.type == "cuda")
        self._is_audio = len(window_shape) == 2

    @property
    def staging(self) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = self._staging.numpy()
        return array

    def forward(self, batch: StepBatch) -> Tensor:
        """(B, T, V) log-probabilities; halves the batch once memory runs out.

        Raises whatever the device raises when one row alone does not fit.
        """
        try:
            return self._forward(batch)
        except torch.OutOfMemoryError:
            if batch.width == 1:
                raise
            logger.warning("out of memory at %d streams a step; trying halves", batch.width)
            return torch.cat([self.forward(half) for half in batch.halves()])

    @torch.inference_mode()
    def _forward(self, batch: StepBatch) -> Tensor:
        windows = torch.from_numpy(batch.windows).to(self._device, non_blocking=True)
        caches = self._caches.encoder_caches(batch.generations, batch.num_frames)
        if self._is_audio:
            return self._model.forward_audio(windows, caches)
        return self._model.forward_features(windows, caches)
