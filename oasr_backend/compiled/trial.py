"""Whether a compiled encoder gives what the eager one does: a few chunks of a few streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_backend.cache import CacheConfig, KvStore, SlotStates
from oasr_backend.compiled.exporter import StepShape
from oasr_backend.models.base import (
    AttentionSpec,
    EncoderCaches,
    EncoderSpec,
    StreamingEncoder,
    TrainedWindow,
)

#: Slots of one step after another.
Steps = Sequence[tuple[int, ...]]

_CPU = torch.device("cpu")
#: Left chunks of the trial: a history comes to be empty, partial and full.
_LEFT_CHUNKS = 2
#: Slots of each step: alone, a stream that joins, one that pauses, all of them in another order.
WHOLE = ((0,), (0, 1), (1, 2, 0), (2, 0), (0, 1, 2))
#: Enough to tell whether a file holds the graph that was tried when it was made.
BRIEF = ((0,), (1, 0))


def relative_error(
    compiled: StreamingEncoder, eager: StreamingEncoder, shape: StepShape, steps: Steps = WHOLE
) -> float:
    """Root mean square of the difference of their frames over that of the eager frames.

    Not a number where the compiled encoder gives one that is none.
    """
    difference = total = 0.0
    for found_BTD, expected_BTD in zip(
        _frames_of(compiled, shape, steps), _frames_of(eager, shape, steps), strict=True
    ):
        difference += float((found_BTD - expected_BTD).double().square().sum())
        total += float(expected_BTD.double().square().sum())
    return float(np.sqrt(difference / max(total, 1e-30)))


def _frames_of(encoder: StreamingEncoder, shape: StepShape, steps: Steps) -> Iterator[Tensor]:
    """The encoder's frames of each step, on random features; a short chunk ends the last."""
    generator = torch.Generator().manual_seed(0)
    streams = _TrialStreams(encoder.spec, shape, num_streams=1 + max(map(max, steps)))
    for step, slots in enumerate(steps):
        features_BWF = torch.randn(
            len(slots), shape.window_frames, shape.num_features, generator=generator
        )
        num_new = shape.chunk_frames
        if step == len(steps) - 1:
            num_new = max(1, shape.chunk_frames // 2)
        with torch.inference_mode():
            encoded_BTD = streams.step(encoder, features_BWF, np.array(slots), num_new)
        yield encoded_BTD[:, :num_new]


class _TrialStreams:
    """The caches of a few streams, as small as they can be."""

    def __init__(self, spec: EncoderSpec, shape: StepShape, num_streams: int) -> None:
        self._states = SlotStates(spec.state_specs, num_streams, _CPU)
        self._kv = None
        if spec.attention is not None:
            self._kv = KvStore(_cache_config(spec.attention, shape, num_streams))
            for slot in range(num_streams):
                self._kv.open(slot)

    def step(
        self,
        encoder: StreamingEncoder,
        features_BWF: Tensor,
        slots_B: npt.NDArray[np.int64],
        num_new: int,
    ) -> Tensor:
        rows_B, num_new_B = torch.from_numpy(slots_B), torch.full((len(slots_B),), num_new)
        states = self._states.staged_views(rows_B)
        if self._kv is None:
            caches = EncoderCaches([], torch.zeros_like(rows_B), num_new_B, states)
            encoded_BTD = encoder.forward_chunk(features_BWF, caches)
        else:
            self._kv.prepare(slots_B)
            views = self._kv.views(
                rows_B, num_new_W=num_new_B, history_frames=self._kv.history_frames(slots_B)
            )
            first_B = torch.from_numpy(self._kv.first_key_positions(slots_B))
            caches = EncoderCaches(views, first_B, num_new_B, states)
            encoded_BTD = encoder.forward_chunk(features_BWF, caches)
            self._kv.commit(slots_B, np.full(len(slots_B), num_new))
        caches.store()
        return encoded_BTD


def _cache_config(attention: AttentionSpec, shape: StepShape, num_streams: int) -> CacheConfig:
    span, chunk = attention.span, shape.chunk_frames
    window = span.frames if isinstance(span, TrainedWindow) else None
    visible = (_LEFT_CHUNKS * chunk if window is None else window) + chunk
    blocks = -(-visible // chunk) + 1
    return CacheConfig(
        num_layers=attention.num_layers,
        n_kv_head=attention.num_kv_heads,
        head_dim=attention.head_dim,
        chunk_size=chunk,
        block_size_frames=chunk,
        num_left_chunks=_LEFT_CHUNKS if window is None else -1,
        window_frames=window,
        prefill_kv_window=window is not None,
        max_num_blocks=num_streams * blocks,
        max_blocks_per_seq=blocks,
        max_batch_size=num_streams,
        device=_CPU,
        dtype=torch.float32,
        position_limit_frames=visible,
    )
