"""Puts the large tensors of a graph into a file beside it, of which only what is read is loaded.

A table of positions is long, and streams read its first rows most: as mapped memory the rest of it
takes none, and processes that serve the same encoder share what they read.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

#: Bytes from which on a tensor is mapped. Below lie the weights, which a session packs anew anyway.
_LEAST_BYTES = 2 << 20


def data_path(graph: Path) -> Path:
    """Where the large tensors of a graph lie."""
    return graph.with_name(f"{graph.name}.data")


def split_large_tensors(path: Path) -> None:
    """Rewrites the graph; one of small tensors alone gets no second file."""
    onnx = import_module("onnx")
    model = onnx.load(path)
    _name_constants(model.graph)
    onnx.save_model(
        model,
        path,
        save_as_external_data=True,
        location=data_path(path).name,
        size_threshold=_LEAST_BYTES,
    )


def _name_constants(graph: Any) -> None:
    """Turns nodes that hold a tensor into named tensors of the graph, which may lie elsewhere."""
    others = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensor = graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
        else:
            others.append(node)
    # One by one, each would be looked for from the front.
    kept = type(graph)(node=others)
    del graph.node[:]
    graph.node.MergeFrom(kept.node)
