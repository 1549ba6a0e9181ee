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
    VALID,
    StepShape,
    new_kv_names,
    next_state_name,
    pool_names,
    state_name,
)
from oasr_backend.compiled.session import NOTHING, Array, GraphRuns, Lasting
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
        self._pool_names = pool_names(spec.attention)
        self._pool: _PoolArrays | None = None
        self._new = _NewFrames(new_kv_names(spec.attention))

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        """(B, W, F) to (B, T, D); K/V are written to the pool and states are scattered."""
        num_rows = features_BWF.shape[0]
        encoded_BTD = torch.empty((num_rows, self._shape.chunk_frames, self._spec.model_dim))
        step = self._step_of(features_BWF, caches)
        following = [
            self._run(step, slice(first, first + _MOST_ROWS), encoded_BTD.numpy())
            for first in range(0, num_rows, _MOST_ROWS)
        ]
        for spec in self._spec.state_specs:
            parts = [torch.from_numpy(part[spec.name]) for part in following]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=spec.slot_axis)
            caches.states[spec.name].scatter(rows)
        return encoded_BTD

    def _step_of(self, features_BWF: Tensor, caches: EncoderCaches) -> _Step:
        inputs: dict[str, Array] = {
            FEATURES: features_BWF.contiguous().numpy(),
            NUM_NEW: caches.num_new_B.numpy(),
            FIRST_POSITION: caches.first_key_position_B.numpy(),
        }
        if self._spec.attention is None:
            return _Step(inputs, self._states_of(caches), None, None)
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
        return _Step(inputs, self._states_of(caches), index.write_BT, self._pool_of(kv.pool))

    def _states_of(self, caches: EncoderCaches) -> dict[str, Array]:
        """Those of the encoder; heads have theirs in the same caches."""
        names = [spec.name for spec in self._spec.state_specs]
        return {name: caches.states[name].gather().numpy() for name in names}

    def _run(self, step: _Step, rows: slice, encoded_BTD: Array) -> dict[str, Array]:
        """Runs some of the step's rows; returns their next states by name."""
        inputs = {name: array[rows] for name, array in step.inputs.items()}
        outputs = {ENCODED: encoded_BTD[rows]}
        following = {}
        for spec in self._spec.state_specs:
            before = step.states[spec.name][(slice(None),) * spec.slot_axis + (rows,)]
            inputs[state_name(spec.name)] = np.ascontiguousarray(before)
            following[spec.name] = np.empty(before.shape, before.dtype)
            outputs[next_state_name(spec.name)] = following[spec.name]
        if step.pool is None or step.write_BT is None:
            self._runs.run(inputs, outputs)
            return following
        write_BT, pool = step.write_BT[rows], step.pool
        new = self._new.of_shape((*write_BT.shape, *pool.frame_shape))
        self._runs.run(inputs, outputs, lasting_inputs=pool.inputs, lasting_outputs=new.outputs)
        pool.frames_XPE[:, write_BT] = new.frames_XBTE
        return following

    def _pool_of(self, pool: BlockPool) -> _PoolArrays:
        """The arrays of the pool that is served, made at its first step."""
        arrays = self._pool
        if arrays is None or arrays.pool is not pool:
            arrays = self._pool = _PoolArrays(pool, self._pool_names)
        return arrays


class _PoolArrays:
    """The pool's memory: (2 L, P, E) to write to, and the graph's input of each of the 2 L."""

    def __init__(self, pool: BlockPool, names: Sequence[str]) -> None:
        self.pool = pool
        self.frame_shape = (pool.config.n_kv_head, pool.config.head_dim)
        self.frames_XPE: Array = pool.kv_frames().flatten(0, 1).numpy()
        layers = self.frames_XPE.reshape(*self.frames_XPE.shape[:2], *self.frame_shape)
        self.inputs = Lasting(dict(zip(names, layers, strict=True)))


@dataclass(frozen=True)
class _Step:
    """Arrays of all rows of a step: rows first, but for the states, which have their own axis."""

    inputs: dict[str, Array]
    states: dict[str, Array]
    write_BT: Array | None
    pool: _PoolArrays | None


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
