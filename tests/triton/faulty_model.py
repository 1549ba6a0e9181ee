"""The shipped model whose step fails on marked audio: 1.5 is an error, 1.75 a broken device."""

from __future__ import annotations

from typing import Any

import torch

from oasr_backend.triton_model import TritonModel

ERRORS = {
    1.5: ValueError("injected into the step"),
    1.75: RuntimeError("CUDA error: an injected illegal memory access"),
}


def fail_on_mark(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    for mark in inputs[0][:, 0].tolist():
        if mark in ERRORS:
            raise ERRORS[mark]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = TritonModel(args)
        acoustic_model = self._model._engine.model
        acoustic_model.get_submodule("filterbank").register_forward_pre_hook(fail_on_mark)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
