"""Streaming speech recognition for NVIDIA Triton: many live streams, one acoustic model."""

from oasr_backend.config import ServingConfig
from oasr_backend.decoders import GpuDecoderConfig, GpuDecoderResult, GpuStreamingDecoder
from oasr_backend.engine import Engine
from oasr_backend.errors import OasrError
from oasr_backend.types import AudioChunk, ChunkResult, Hypothesis

__all__ = [
    "AudioChunk",
    "ChunkResult",
    "Engine",
    "GpuDecoderConfig",
    "GpuDecoderResult",
    "GpuStreamingDecoder",
    "Hypothesis",
    "OasrError",
    "ServingConfig",
]
