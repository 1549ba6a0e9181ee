"""One ONNX Runtime session that several threads run at once, on memory that they name."""

from __future__ import annotations

import os
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


def import_runtime(name: str = "onnxruntime") -> Any:
    """The package, which eager serving does without, or a module of it."""
    # Builds of it report to their maker unless they are told not to.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return import_module(name)


def open_session(path: Path) -> Any:
    """An `onnxruntime.InferenceSession`. Raises whatever that does for a file it cannot read."""
    onnxruntime = import_runtime()
    options = onnxruntime.SessionOptions()
    # More would spin while they wait for each other: several steps run at once instead.
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
    """Arrays that lie where they are from run to run."""

    arrays: Arrays


NOTHING = Lasting({})


class GraphRuns:
    """Runs of a session in place: inputs are read where they lie, outputs written where told.

    Thread-safe: each thread has a binding of its own, in which lasting arrays stay bound.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        # The exporter leaves out what the encoder does not read.
        self._read = {tensor.name for tensor in session.get_inputs()}
        self._local = threading.local()

    def run(
        self,
        inputs: Arrays,
        outputs: Arrays,
        *,
        lasting_inputs: Lasting = NOTHING,
        lasting_outputs: Lasting = NOTHING,
    ) -> None:
        """Arrays are contiguous and of the graph's types; all of its outputs are named."""
        local = self._local
        if not hasattr(local, "binding"):
            local.binding = self._session.io_binding()
            local.inputs = local.outputs = NOTHING
        if local.inputs is not lasting_inputs:
            self._bind_inputs(local.binding, lasting_inputs.arrays)
            local.inputs = lasting_inputs
        if local.outputs is not lasting_outputs:
            self._bind_outputs(local.binding, lasting_outputs.arrays)
            local.outputs = lasting_outputs
        self._bind_inputs(local.binding, inputs)
        self._bind_outputs(local.binding, outputs)
        self._session.run_with_iobinding(local.binding)

    def _bind_inputs(self, binding: Any, arrays: Arrays) -> None:
        for name, array in arrays.items():
            if name in self._read:
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, _address(array))

    @staticmethod
    def _bind_outputs(binding: Any, arrays: Arrays) -> None:
        for name, array in arrays.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, _address(array))


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
