"""A streaming encoder whose step is one run of a compiled graph.

Shapes: B rows, W feature frames of a window, F features a frame, H history frames, T new frames,
K = H + T, D model, L layers, X = 2 * L, P frames of the pool, E values of a frame's K or V.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.kv_views import StepCaches
from oasr_backend.compiled.exporter import (
    ENCODED,
    FEATURES,
    FIRST_POSITION,
    NUM_NEW,
    READ_INDEX,
    SLOTS,
    VALID,
    StepShape,
    layer_names,
    new_kv_names,
    next_state_name,
    pool_names,
    state_name,
)
from oasr_backend.compiled.session import NOTHING, Array, GraphRuns, Lasting
from oasr_backend.compiled.state_outputs import StateOutput, told_rolled
from oasr_backend.errors import StreamStateError
from oasr_backend.models.base import EncoderCaches, EncoderSpec, StreamingEncoder

#: Rows of one run. More gain next to nothing, and the memory of a run grows with them.
_MOST_ROWS = 16


class SessionEncoder(StreamingEncoder):
    """Serves `spec` by an ONNX Runtime session, in float32 on the host.

    Several threads may step disjoint rows at once.
    """

    def __init__(self, session: Any, spec: EncoderSpec, shape: StepShape) -> None:
        super().__init__()
        self._runs, self._spec, self._shape = GraphRuns(session), spec, shape
        self._stored: _StoredArrays | None = None
        self._new = _NewFrames(new_kv_names(spec.attention))
        rolled = told_rolled(session)
        self._outputs = [
            StateOutput.of(state, rolled.get(state.name)) for state in spec.state_specs
        ]

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        """(B, W, F) to (B, T, D); K/V are written to the pool and states are handed over."""
        num_rows = features_BWF.shape[0]
        encoded_BTD = torch.empty((num_rows, self._shape.chunk_frames, self._spec.model_dim))
        step = self._step_of(features_BWF, caches)
        following = [
            self._run(step, slice(first, first + _MOST_ROWS), encoded_BTD.numpy())
            for first in range(0, num_rows, _MOST_ROWS)
        ]
        for output, *parts in zip(self._outputs, *following, strict=True):
            output.hand_over(parts, caches.states[output.state.name])
        return encoded_BTD

    def _step_of(self, features_BWF: Tensor, caches: EncoderCaches) -> _Step:
        inputs: dict[str, Array] = {
            FEATURES: features_BWF.contiguous().numpy(),
            NUM_NEW: caches.num_new_B.numpy(),
            FIRST_POSITION: caches.first_key_position_B.numpy(),
        }
        if self._spec.attention is None:
            return _Step(inputs | self._slots_of(caches), None, self._stored_of(None, caches))
        kv = caches.kv
        if not isinstance(kv, StepCaches):
            raise StreamStateError(
                f"a compiled encoder reads the whole pool, which {type(kv).__name__} does not "
                "give; take a step's caches from KvStore.views"
            )
        index = kv.step_index()
        # Counted from the first column, which a young row's history does not reach back to.
        inputs[FIRST_POSITION] = inputs[FIRST_POSITION] + index.history_B - index.read_BH.shape[1]
        inputs[READ_INDEX], inputs[VALID] = index.read_BH, index.valid_BK
        inputs |= self._slots_of(caches)
        return _Step(inputs, index.write_BT, self._stored_of(kv.pool, caches))

    def _slots_of(self, caches: EncoderCaches) -> dict[str, Array]:
        """The rows of every state, which all lie in the same slots."""
        states = self._spec.state_specs
        return {SLOTS: caches.states[states[0].name].slot_ids.numpy()} if states else {}

    def _run(self, step: _Step, rows: slice, encoded_BTD: Array) -> list[Array]:
        """Runs some of the step's rows; returns what it gives of each state."""
        inputs = {name: array[rows] for name, array in step.inputs.items()}
        outputs = {ENCODED: encoded_BTD[rows]}
        following = [output.empty(len(outputs[ENCODED])) for output in self._outputs]
        for output, array in zip(self._outputs, following, strict=True):
            outputs[next_state_name(output.state.name)] = array
        stored = step.stored
        if step.write_BT is None:
            self._runs.run(inputs, outputs, lasting_inputs=stored.inputs)
            return following
        write_BT = step.write_BT[rows]
        new = self._new.of_shape((*write_BT.shape, *stored.frame_shape))
        self._runs.run(inputs, outputs, lasting_inputs=stored.inputs, lasting_outputs=new.outputs)
        stored.frames_XPE[:, write_BT] = new.frames_XBTE
        return following

    def _stored_of(self, pool: BlockPool | None, caches: EncoderCaches) -> _StoredArrays:
        """The memory that is served, as arrays that are made at its first step."""
        buffers = [caches.states[state.name].buffer for state in self._spec.state_specs]
        stored = self._stored
        if stored is None or not stored.are_of(pool, buffers):
            stored = self._stored = _StoredArrays(self._spec, pool, buffers)
        return stored


class _StoredArrays:
    """The pool's and the states' memory, which a run reads where it lies.

    `frames_XPE`, (2 L, P, E), is the pool's to write to.
    """

    def __init__(
        self, spec: EncoderSpec, pool: BlockPool | None, buffers: Sequence[Tensor]
    ) -> None:
        self._pool, self._buffers = pool, buffers
        arrays: dict[str, Array] = {}
        for state, buffer in zip(spec.state_specs, buffers, strict=True):
            arrays[state_name(state.name)] = whole = buffer.numpy()
            arrays |= zip(layer_names(state), whole, strict=False)
        if pool is not None:
            self.frame_shape = (pool.config.n_kv_head, pool.config.head_dim)
            self.frames_XPE: Array = pool.kv_frames().flatten(0, 1).numpy()
            layers = self.frames_XPE.reshape(*self.frames_XPE.shape[:2], *self.frame_shape)
            arrays |= zip(pool_names(spec.attention), layers, strict=True)
        self.inputs = Lasting(arrays)

    def are_of(self, pool: BlockPool | None, buffers: Sequence[Tensor]) -> bool:
        same = all(one is other for one, other in zip(self._buffers, buffers, strict=True))
        return same and self._pool is pool


@dataclass(frozen=True)
class _Step:
    """Arrays of all rows of a step, rows first, and the memory beside them."""

    inputs: dict[str, Array]
    write_BT: Array | None
    stored: _StoredArrays


class _NewFrames(threading.local):
    """Memory for the K/V that a run puts out, which is then copied to the pool; one a thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._block = np.empty(0, dtype=np.float32)
        self._shape: tuple[int, ...] = ()
        self.frames_XBTE, self.outputs = self._block, NOTHING

    def of_shape(self, shape: tuple[int, ...]) -> _NewFrames:
        """Itself, with a tensor of (B, T, heads, head dimension) for each name."""
        if shape != self._shape:
            size = len(self._names) * math.prod(shape)
            if self._block.size < size:
                self._block = np.empty(size, dtype=np.float32)
            tensors = self._block[:size].reshape(len(self._names), *shape)
            self.outputs = Lasting(dict(zip(self._names, tensors, strict=True)))
            self.frames_XBTE, self._shape = tensors.reshape(*tensors.shape[:3], -1), shape
        return self
