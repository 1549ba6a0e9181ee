"""The least time that a card can take for a step: what must be read, written and multiplied.

Weights are read once a step, whatever its width. Each stream's states are read and written once,
its K/V history is read and its new frames are written. Products are those of matrices and
convolutions. The floor is the longer of the two times; it knows of no launch and no wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from oasr_backend.config import ServingConfig
from oasr_backend.features.samples import FLOAT32
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.batching import StepBatch
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.store import StepRows

_REMEDY = "give --bandwidth-tbs and --tflops, those of its data sheet"


@dataclass(frozen=True)
class Card:
    """Bytes and floating-point operations a second, from the maker's data sheet."""

    name: str
    bytes_per_s: float
    flops_per_s: float


#: Terabytes a second of memory, and teraflops without sparsity by type of the factors. The data
#: sheet of the H200 (SXM): HBM3e 4.8 TB/s; tensor cores 989 in 16 bits; 67 in float32 without them.
_DATA_SHEETS = {"H200": (4.8, {"float16": 989.0, "bfloat16": 989.0, "float32": 67.0})}


def card_of(
    name: str, dtype: str, *, bandwidth_tbs: float | None = None, tflops: float | None = None
) -> Card:
    """The card of this name, or of the two figures given. Raises ValueError for an unknown one."""
    if bandwidth_tbs and tflops:
        return Card(name, bandwidth_tbs * 1e12, tflops * 1e12)
    for known, (bandwidth, rates) in _DATA_SHEETS.items():
        if known in name and dtype in rates:
            return Card(name, bandwidth * 1e12, rates[dtype] * 1e12)
    known_names = ", ".join(_DATA_SHEETS)
    raise ValueError(f"no floor is known of {name} in {dtype}, only of {known_names}; {_REMEDY}")


@dataclass(frozen=True)
class StepWork:
    """What a step cannot do without; all but the weights for each stream of it."""

    weight_bytes: int
    stream_bytes: int
    stream_flops: int

    def bytes_ms(self, card: Card, width: int) -> float:
        return (self.weight_bytes + width * self.stream_bytes) / card.bytes_per_s * 1e3

    def flops_ms(self, card: Card, width: int) -> float:
        return width * self.stream_flops / card.flops_per_s * 1e3

    def floor_ms(self, card: Card, width: int) -> float:
        return max(self.bytes_ms(card, width), self.flops_ms(card, width))

    @classmethod
    def of(cls, engine: Engine, checkpoint: Path) -> StepWork:
        """That of an engine which serves the checkpoint."""
        plain = _on_cpu(checkpoint, engine.config)
        model = plain.parts.model
        weights = (*model.encoder.parameters(), *model.heads.parameters())
        itemsize = getattr(torch, engine.config.model.dtype).itemsize
        return cls(
            weight_bytes=itemsize * sum(weight.numel() for weight in weights),
            stream_bytes=2 * engine.store.states.nbytes_per_stream + _kv_bytes(engine),
            stream_flops=_count_flops(plain),
        )


def full_batch(engine: Engine, slots: list[int], *, seed: int = 0) -> StepBatch:
    """A window of noise for every slot."""
    width, store = len(slots), engine.store
    rows = engine.parts.runner.next_staging()[FLOAT32][:width]
    rows[:] = np.random.default_rng(seed).standard_normal(rows.shape) * 0.05
    num_frames_B = np.full(width, store.chunk_frames)
    num_real_B = np.full(width, engine.parts.geometry.window_frames)
    return StepBatch(StepRows(np.array(slots), num_frames_B, num_real_B), rows)


def _kv_bytes(engine: Engine) -> int:
    """Bytes of history read and of frames written by one stream with a full history."""
    attention = engine.parts.model.spec.attention
    if attention is None:
        return 0
    frames = engine.store.most_history_frames + engine.store.chunk_frames
    itemsize = getattr(torch, engine.config.model.dtype).itemsize
    return (
        2 * attention.num_layers * attention.num_kv_heads * attention.head_dim * frames * itemsize
    )


def _on_cpu(checkpoint: Path, config: ServingConfig) -> Engine:
    """The same model for one stream, by PyTorch's own operators, which can be counted."""
    settings = config.changed(
        dtype="float32", cpu_encoder="pytorch", max_streams=1, max_step_streams=1, max_num_blocks=0
    )
    return load_engine(checkpoint, settings, device="cpu", may_export=False)


def _count_flops(engine: Engine) -> int:
    """Of one stream's step."""
    store = engine.store
    slot = store.open(engine.parts.admission.defaults)
    batch = full_batch(engine, [slot])
    store.prepare(batch.rows.slots_B)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        engine.parts.runner.forward_eagerly(batch)
    store.close(slot)
    return int(counter.get_total_flops())
