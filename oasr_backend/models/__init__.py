"""Acoustic models: the contract of an encoder and a head, and their implementations."""

from oasr_backend.models.acoustic_model import AcousticModel, ModelOutput
from oasr_backend.models.base import (
    AttentionSpec,
    ChunkedSpec,
    ChunkSettings,
    EncoderCaches,
    EncoderSpec,
    LeftChunks,
    StreamingEncoder,
    TrainedWindow,
    check_chunk_size,
)
from oasr_backend.models.conformer import ConformerConfig, ConformerEncoder
from oasr_backend.models.heads import CtcHead, Head

__all__ = [
    "AcousticModel",
    "AttentionSpec",
    "ChunkSettings",
    "ChunkedSpec",
    "ConformerConfig",
    "ConformerEncoder",
    "CtcHead",
    "EncoderCaches",
    "EncoderSpec",
    "Head",
    "LeftChunks",
    "ModelOutput",
    "StreamingEncoder",
    "TrainedWindow",
    "check_chunk_size",
]
