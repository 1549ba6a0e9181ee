"""Streaming speech recognition for Triton: a thin shell over `oasr_backend`."""

from __future__ import annotations

import gc
from typing import Any

# Walking what PyTorch's import makes takes a fifth of its time; the service turns this on again.
gc.disable()

from oasr_backend.triton_backend.service import Service, StreamingService  # noqa: E402


class TritonPythonModel:
    """The class that Triton's Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model: Service = StreamingService(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._model.execute(requests)

    def is_ready(self) -> bool:
        """Triton releases that know it ask before they call the model ready."""
        return self._model.is_ready()

    def finalize(self) -> None:
        self._model.close()
