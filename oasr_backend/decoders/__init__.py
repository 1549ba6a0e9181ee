"""CTC decoding of many live streams in batched tensor operations."""

from oasr_backend.decoders.config import GpuDecoderConfig
from oasr_backend.decoders.result import GpuDecoderResult
from oasr_backend.decoders.rows import StreamState
from oasr_backend.decoders.streaming import GpuStreamingDecoder

__all__ = ["GpuDecoderConfig", "GpuDecoderResult", "GpuStreamingDecoder", "StreamState"]
