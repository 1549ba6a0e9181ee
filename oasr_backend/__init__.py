"""Streaming speech recognition for NVIDIA Triton: many live streams, one acoustic model.

The public names load on first use: the launcher checks the machine before it imports PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oasr_backend.config import ServingConfig
    from oasr_backend.decoders import GpuDecoderConfig, GpuDecoderResult, GpuStreamingDecoder
    from oasr_backend.errors import OasrError
    from oasr_backend.options import StreamOptions
    from oasr_backend.streaming.assemble import load_engine
    from oasr_backend.streaming.engine import Engine
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
    "StreamOptions",
    "load_engine",
]

_HOME = {
    "AudioChunk": "types",
    "ChunkResult": "types",
    "Engine": "streaming.engine",
    "GpuDecoderConfig": "decoders",
    "GpuDecoderResult": "decoders",
    "GpuStreamingDecoder": "decoders",
    "Hypothesis": "types",
    "OasrError": "errors",
    "ServingConfig": "config",
    "StreamOptions": "options",
    "load_engine": "streaming.assemble",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
