"""The graph with its linear layers in 8 bits."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from oasr_backend.compiled.exporter import StepShape, write_graph
from oasr_backend.compiled.session import import_runtime
from oasr_backend.models.base import StreamingEncoder


def write_quantised(encoder: StreamingEncoder, shape: StepShape, path: Path) -> None:
    """Weights are rounded once, a scale an output channel; inputs anew in each run, a scale a step.

    A row's result depends on the rows beside it: they share the scale of their inputs.
    """
    quantization = import_runtime("onnxruntime.quantization")

    with tempfile.TemporaryDirectory(dir=path.parent) as staging:
        exact = Path(staging, "float.onnx")
        write_graph(encoder, shape, exact)
        root = logging.getLogger()
        level = root.level
        root.setLevel(logging.ERROR)  # It advises on its own options.
        try:
            quantization.quantize_dynamic(
                exact, path, per_channel=True, weight_type=quantization.QuantType.QInt8,
                op_types_to_quantize=["MatMul", "Gemm"],
            )  # fmt: skip
        finally:
            root.setLevel(level)
