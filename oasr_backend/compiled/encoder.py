"""A streaming encoder whose step is one run of a compiled graph.

Shapes: B rows, W feature frames of a window, F features a frame, H history frames, T new frames,
K = H + T, D model, L layers, N = B * T new frames of all rows, P frames of the pool, E values of a
frame's K or V.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
from oasr_backend.compiled.session import Array, GraphRuns, Lasting
from oasr_backend.errors import StreamStateError
from oasr_backend.models.base import EncoderCaches, EncoderSpec, StreamingEncoder


class SessionEncoder(StreamingEncoder):
    """Serves `spec` by an ONNX Runtime session, in float32 on the host.

    Several threads may step disjoint rows at once.
    """

    def __init__(self, session: Any, spec: EncoderSpec, shape: StepShape) -> None:
        super().__init__()
        self._runs, self._spec, self._shape = GraphRuns(session), spec, shape
        self._pool_names = pool_names(spec.attention)
        self._new_names = new_kv_names(spec.attention)
        self._pool: _PoolArrays | None = None
        self._scratch = _Scratch()

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        """(B, W, F) to (B, T, D); K/V are written to the pool and states are scattered."""
        encoded_BTD = torch.empty(
            (features_BWF.shape[0], self._shape.chunk_frames, self._spec.model_dim)
        )
        states = {spec.name: caches.states[spec.name].gather() for spec in self._spec.state_specs}
        following = {name: torch.empty_like(rows) for name, rows in states.items()}
        inputs = {
            FEATURES: features_BWF.contiguous().numpy(),
            NUM_NEW: caches.num_new_B.numpy(),
            **{state_name(name): rows.numpy() for name, rows in states.items()},
        }
        outputs = {
            ENCODED: encoded_BTD.numpy(),
            **{next_state_name(name): rows.numpy() for name, rows in following.items()},
        }
        if self._spec.attention is None:
            inputs[FIRST_POSITION] = caches.first_key_position_B.numpy()
            self._runs.run(inputs, outputs)
        else:
            self._run_with_history(caches, inputs, outputs)
        for name, rows in following.items():
            caches.states[name].scatter(rows)
        return encoded_BTD

    def _run_with_history(
        self, caches: EncoderCaches, inputs: dict[str, Array], outputs: dict[str, Array]
    ) -> None:
        kv = caches.kv
        if not isinstance(kv, StepCaches):
            raise StreamStateError(
                f"a compiled encoder reads the whole pool, which {type(kv).__name__} does not "
                "give; take a step's caches from KvStore.views"
            )
        index, pool = kv.step_index(), self._pool_of(kv.pool)
        # Counted from the first column, which a young row's history does not reach back to.
        young_B = index.history_B - index.read_BH.shape[1]
        inputs[FIRST_POSITION] = caches.first_key_position_B.numpy() + young_B
        inputs[READ_INDEX], inputs[VALID] = index.read_BH, index.valid_BK
        new_XNE = self._scratch.take((len(self._new_names), index.write_N.size, pool.frame_size))
        new_shape = (young_B.size, self._shape.chunk_frames, *pool.frame_shape)
        for name, new_NE in zip(self._new_names, new_XNE, strict=True):
            outputs[name] = new_NE.reshape(new_shape)
        self._runs.run(inputs, outputs, lasting=pool.inputs)
        pool.frames_XPE[:, index.write_N] = new_XNE

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
        self.frame_size = self.frame_shape[0] * self.frame_shape[1]
        self.frames_XPE: Array = pool.kv_frames().flatten(0, 1).numpy()
        layers = self.frames_XPE.reshape(*self.frames_XPE.shape[:2], *self.frame_shape)
        self.inputs = Lasting(dict(zip(names, layers, strict=True)))


class _Scratch(threading.local):
    """Memory for outputs that are copied on at once; each thread has its own."""

    def __init__(self) -> None:
        self._block = np.empty(0, dtype=np.float32)

    def take(self, shape: tuple[int, int, int]) -> Array:
        size = shape[0] * shape[1] * shape[2]
        if self._block.size < size:
            self._block = np.empty(size, dtype=np.float32)
        return self._block[:size].reshape(shape)
