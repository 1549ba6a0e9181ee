"""An encoder's step as an ONNX graph.

Shapes: B rows, W feature frames of a window, F features a frame, H history frames, T new frames,
K = H + T, P frames of the whole pool, S slots of the states.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.compiled.dense import DenseKv, DenseLayout, DenseState
from oasr_backend.compiled.state_outputs import Rolled, tell_rolled
from oasr_backend.models.base import AttentionSpec, EncoderCaches, EncoderSpec, StreamingEncoder

OPSET = 17
_ROWS, _HISTORY, _POOL, _SLOTS = 2, 3, 64, 4


@dataclass(frozen=True)
class StepShape:
    """Sizes that a graph holds as constants; rows, history and pool are free."""

    chunk_frames: int
    window_frames: int
    num_features: int


@dataclass(frozen=True)
class TensorName:
    """A tensor of the graph: its example's shape, and which axes are free, by their names."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    free: tuple[tuple[int, str], ...] = ((0, "B"),)

    def example(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)


FEATURES = "features"
NUM_NEW = "num_new"
FIRST_POSITION = "first_position"
READ_INDEX = "read_index"
VALID = "valid"
SLOTS = "slots"
ENCODED = "encoded"


def pool_names(attention: AttentionSpec | None) -> list[str]:
    """K of every layer, then V of every layer."""
    return [f"{name}_pool" for name in _layer_names(attention)]


def new_kv_names(attention: AttentionSpec | None) -> list[str]:
    """K of every layer, then V of every layer."""
    return [f"{name}_new" for name in _layer_names(attention)]


def _layer_names(attention: AttentionSpec | None) -> list[str]:
    layers = range(attention.num_layers if attention else 0)
    return [f"{kind}_{layer}" for kind in "kv" for layer in layers]


def state_name(name: str) -> str:
    return f"state_{name}"


def layer_names(state: StreamStateSpec) -> list[str]:
    """A state whose axis 0 counts layers, layer by layer; none where slots are not next to it."""
    layers = range(state.shape[0] if state.slot_axis == 1 else 0)
    return [f"layer_{layer}_of_{state_name(state.name)}" for layer in layers]


def next_state_name(name: str) -> str:
    return f"next_state_{name}"


def graph_inputs(spec: EncoderSpec, shape: StepShape) -> list[TensorName]:
    """Every input that an encoder may read, in the order of the graph.

    Pools and states are whole, and each state also lies there layer by layer.
    """
    inputs = [
        TensorName(FEATURES, (_ROWS, shape.window_frames, shape.num_features)),
        TensorName(NUM_NEW, (_ROWS,), torch.int64),
        TensorName(FIRST_POSITION, (_ROWS,), torch.int64),
        TensorName(SLOTS, (_ROWS,), torch.int64),
    ]
    if spec.attention is not None:
        columns = _HISTORY + shape.chunk_frames
        frame = (spec.attention.num_kv_heads, spec.attention.head_dim)
        inputs += [
            TensorName(READ_INDEX, (_ROWS, _HISTORY), torch.int64, ((0, "B"), (1, "H"))),
            TensorName(VALID, (_ROWS, columns), torch.bool, ((0, "B"), (1, "K"))),
        ]
        inputs += [
            TensorName(name, (_POOL, *frame), free=((0, "P"),))
            for name in pool_names(spec.attention)
        ]
    return inputs + [tensor for state in spec.state_specs for tensor in _state_inputs(state)]


def _state_inputs(state: StreamStateSpec) -> Iterator[TensorName]:
    dtype, shape = state.dtype or torch.float32, state.buffer_shape(_SLOTS)
    yield TensorName(state_name(state.name), shape, dtype, ((state.slot_axis, "S"),))
    for name in layer_names(state):
        yield TensorName(name, shape[1:], dtype, ((0, "S"),))


def graph_outputs(spec: EncoderSpec) -> dict[str, int]:
    """The axis of the rows of every output, in the order of the graph."""
    states = {next_state_name(state.name): state.slot_axis for state in spec.state_specs}
    return dict.fromkeys((ENCODED, *new_kv_names(spec.attention)), 0) | states


class _DenseStep(nn.Module):
    """The encoder's step as a function of tensors alone."""

    def __init__(self, encoder: StreamingEncoder, shape: StepShape) -> None:
        super().__init__()
        self.encoder = encoder
        self._spec = encoder.spec
        self._names = [tensor.name for tensor in graph_inputs(self._spec, shape)]
        #: What a run handed over as the newest frames of windows, by state.
        self.rolled: dict[str, Rolled] = {}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self._names, inputs, strict=True))
        kv = self._kv(given)
        states = {state.name: _dense_state(state, given) for state in self._spec.state_specs}
        caches = EncoderCaches(
            kv=cast(Any, kv),
            first_key_position_B=given[FIRST_POSITION],
            num_new_B=given[NUM_NEW],
            states=cast(Any, states),
        )
        encoded_BTD = self.encoder.forward_chunk(given[FEATURES], caches)
        self.rolled = {name: state.rolled for name, state in states.items() if state.rolled}
        new = [layer.new[of_v] for of_v in (0, 1) for layer in kv]
        return (encoded_BTD, *new, *(state.output for state in states.values()))

    def _kv(self, given: dict[str, Tensor]) -> list[DenseKv]:
        if self._spec.attention is None:
            return []
        layout = DenseLayout(given[VALID], given[READ_INDEX], given[NUM_NEW])
        pools = [given[name] for name in pool_names(self._spec.attention)]
        layers = len(pools) // 2
        pairs = zip(pools[:layers], pools[layers:], strict=True)
        return [DenseKv(k_FNC, v_FNC, layout) for k_FNC, v_FNC in pairs]


def _dense_state(state: StreamStateSpec, given: dict[str, Tensor]) -> DenseState:
    layers = [given[name] for name in layer_names(state)]
    return DenseState(given[state_name(state.name)], layers, given[SLOTS], state.slot_axis)


def write_graph(encoder: StreamingEncoder, shape: StepShape, path: Path) -> None:
    """Writes the encoder's step to `path`; raises whatever the exporter does where it cannot."""
    inputs = graph_inputs(encoder.spec, shape)
    examples = [tensor.example() for tensor in inputs]
    # Every column may be read, and every frame is real: what a trace computes must be finite.
    for tensor, example in zip(inputs, examples, strict=True):
        if tensor.name in (VALID, NUM_NEW):
            example.fill_(1 if tensor.name == VALID else shape.chunk_frames)
    outputs = graph_outputs(encoder.spec)
    free = {tensor.name: dict(tensor.free) for tensor in inputs}
    free |= {name: {axis: "B"} for name, axis in outputs.items()}
    step = _DenseStep(encoder, shape).eval()
    with torch.no_grad(), _quiet_exporter():
        torch.onnx.export(
            step,
            tuple(examples),
            str(path),
            input_names=[tensor.name for tensor in inputs],
            output_names=list(outputs),
            dynamic_axes=free,
            opset_version=OPSET,
            dynamo=False,
        )
    tell_rolled(path, step.rolled)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporter warns of itself and of every size that a graph holds as a constant."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
