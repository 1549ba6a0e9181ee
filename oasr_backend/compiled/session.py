"""One ONNX Runtime session that several threads run at once, on memory that they name."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
#: Arrays by the graph's names.
Arrays = Mapping[str, Array]


def open_session(path: Path) -> Any:
    """An `onnxruntime.InferenceSession`. Raises whatever that does for a file it cannot read."""
    # Eager serving does without it.
    onnxruntime = import_module("onnxruntime")

    options = onnxruntime.SessionOptions()
    # A step has one core: several steps run at once instead.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Patterns of memory would be kept of every width and history that ever ran.
    options.enable_mem_pattern = False
    return onnxruntime.InferenceSession(
        str(path),
        options,
        providers=["CPUExecutionProvider"],
        # A split of all layers' states needs a squeeze a layer behind it.
        disabled_optimizers=["GatherSliceToSplitFusion"],
    )


@dataclass(frozen=True, eq=False)
class Lasting:
    """Inputs that lie where they are from run to run."""

    arrays: Arrays


class GraphRuns:
    """Runs of a session in place: inputs are read where they lie, outputs written where told.

    Thread-safe. What a run does not name stays bound as it was in the thread's last run.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        # The exporter leaves out what the encoder does not read.
        self._read = {tensor.name for tensor in session.get_inputs()}
        self._local = threading.local()

    def run(self, inputs: Arrays, outputs: Arrays, *, lasting: Lasting | None = None) -> None:
        """Arrays are contiguous, of the graph's types. `lasting` is bound once a thread."""
        binding = self._binding(lasting)
        self._bind_inputs(binding, inputs)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, _address(array))
        self._session.run_with_iobinding(binding)

    def _binding(self, lasting: Lasting | None) -> Any:
        local = self._local
        if not hasattr(local, "binding") or local.lasting is not lasting:
            local.binding, local.lasting = self._session.io_binding(), lasting
            if lasting is not None:
                self._bind_inputs(local.binding, lasting.arrays)
        return local.binding

    def _bind_inputs(self, binding: Any, arrays: Arrays) -> None:
        for name, array in arrays.items():
            if name in self._read:
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, _address(array))


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
