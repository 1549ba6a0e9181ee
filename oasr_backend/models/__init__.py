"""Streaming encoders: the contract and its implementations."""

from oasr_backend.models.base import EncoderCaches, EncoderSpec, StreamingEncoder
from oasr_backend.models.conformer import ConformerConfig, ConformerEncoder

__all__ = [
    "ConformerConfig",
    "ConformerEncoder",
    "EncoderCaches",
    "EncoderSpec",
    "StreamingEncoder",
]
