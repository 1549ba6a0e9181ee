"""Streams of features through one encoder, on memory that is NaN where it is freed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_backend.cache import CacheConfig, KvStore, SlotStates
from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.compiled import GraphFiles, SessionEncoder, compiled_encoder
from oasr_backend.models import AcousticModel, EncoderCaches, StreamingEncoder
from oasr_backend.models.base import TrainedWindow
from tests.conftest import GOLDEN_DIR
from tests.reference.poison import PoisonedPool, PoisonedStates

CPU = torch.device("cpu")
CHUNK = 4
NUM_FEATURES = 80
FloatArray = npt.NDArray[np.float32]


def golden_model(name: str = "wenet_small", *, num_positions: int = 512) -> AcousticModel:
    model = open_checkpoint(GOLDEN_DIR / name).load().model
    model.prepare(device=CPU, dtype=torch.float32, num_positions=num_positions)
    return model


@cache
def golden_encoder() -> StreamingEncoder:
    return golden_model().encoder


def window_frames(encoder: StreamingEncoder, chunk: int = CHUNK) -> int:
    spec = encoder.spec
    return (chunk - 1) * spec.subsampling_rate + spec.right_context_frames + 1


def compiled(
    encoder: StreamingEncoder,
    folder: Path,
    *,
    choice: str = "onnx",
    chunk: int = CHUNK,
    num_features: int = NUM_FEATURES,
) -> SessionEncoder:
    found = compiled_encoder(
        encoder,
        choice=choice,
        chunk_frames=chunk,
        window_frames=window_frames(encoder, chunk),
        num_features=num_features,
        files=GraphFiles(folder),
    )
    assert isinstance(found, SessionEncoder)
    return found


class FeatureStreams:
    """Slots of one K/V store and one set of states, stepped by hand.

    A stream's features follow from its name and the number of its chunks alone.
    """

    def __init__(
        self,
        encoder: StreamingEncoder,
        *,
        num_slots: int = 4,
        num_left_chunks: int = 2,
        position_limit: int = 500,
        num_features: int = NUM_FEATURES,
        chunk: int = CHUNK,
    ) -> None:
        self.encoder, self._chunk, self._num_features = encoder, chunk, num_features
        spec = encoder.spec
        has_floats = all(state.dtype is None for state in spec.state_specs)
        states = PoisonedStates if has_floats else SlotStates
        self._states = states(spec.state_specs, num_slots, CPU)
        self._kv = None
        if spec.attention is not None:
            window = None
            if isinstance(spec.attention.span, TrainedWindow):
                window, num_left_chunks = spec.attention.span.frames, -1
            config = CacheConfig(
                num_layers=spec.attention.num_layers,
                n_kv_head=spec.attention.num_kv_heads,
                head_dim=spec.attention.head_dim,
                chunk_size=chunk,
                # No multiple of the chunk, so that chunks cross the ends of blocks.
                block_size_frames=chunk + 1,
                num_left_chunks=num_left_chunks,
                window_frames=window,
                prefill_kv_window=window is not None,
                max_num_blocks=40 * num_slots,
                max_blocks_per_seq=40,
                max_batch_size=num_slots,
                device=CPU,
                dtype=torch.float32,
                position_limit_frames=position_limit,
            )
            self._kv = KvStore(config, pool=PoisonedPool(config))
        self._names: dict[int, int] = {}
        self._heard: dict[int, int] = {}
        self._lock = threading.Lock()

    def is_open(self, slot: int) -> bool:
        return slot in self._names

    def open(self, slot: int, name: int) -> None:
        self._names[slot], self._heard[slot] = name, 0
        self._states.open(slot)
        if self._kv is not None:
            self._kv.open(slot)

    def close(self, slot: int) -> None:
        del self._names[slot], self._heard[slot]
        self._states.close(slot)
        if self._kv is not None:
            self._kv.close(slot)

    def step(self, slots: Sequence[int], *, num_new: int | None = None) -> list[FloatArray]:
        """One chunk of each slot; the real frames (T, D) of each."""
        new = self._chunk if num_new is None else num_new
        slots_B, rows_B = np.array(slots), torch.tensor(slots)
        num_new_B = torch.full((len(slots),), new)
        with self._lock:
            features_BWF = torch.stack([self._features(slot) for slot in slots])
            caches = self._caches(slots_B, rows_B, num_new_B)
        with torch.inference_mode():
            encoded_BTD = self.encoder.forward_chunk(features_BWF, caches)
            caches.store()
        with self._lock:
            for slot in slots:
                self._heard[slot] += 1
            if self._kv is not None:
                self._kv.commit(slots_B, np.full(len(slots), new))
        return [encoded_TD[:new].numpy().copy() for encoded_TD in encoded_BTD]

    def _features(self, slot: int) -> Tensor:
        seed = self._names[slot] * 1000 + self._heard[slot]
        generator = torch.Generator().manual_seed(seed)
        frames = window_frames(self.encoder, self._chunk)
        return torch.randn(frames, self._num_features, generator=generator)

    def _caches(
        self, slots_B: npt.NDArray[np.int64], rows_B: Tensor, num_new_B: Tensor
    ) -> EncoderCaches:
        if self._kv is None:
            nowhere_B = torch.zeros_like(rows_B)
            return EncoderCaches([], nowhere_B, num_new_B, self._states.staged_views(rows_B))
        self._kv.prepare(slots_B)
        views = self._kv.views(
            rows_B, num_new_W=num_new_B, history_frames=self._kv.history_frames(slots_B)
        )
        first_B = torch.from_numpy(self._kv.first_key_positions(slots_B))
        return EncoderCaches(views, first_B, num_new_B, self._states.staged_views(rows_B))
