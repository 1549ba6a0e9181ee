"""The streaming Zipformer encoder of icefall's checkpoints."""

from oasr_backend.models.zipformer.config import StackConfig, StackFrames, ZipformerConfig
from oasr_backend.models.zipformer.encoder import ZipformerEncoder, icefall_name

__all__ = ["StackConfig", "StackFrames", "ZipformerConfig", "ZipformerEncoder", "icefall_name"]
