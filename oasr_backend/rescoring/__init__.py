"""Second pass: a stream's hypotheses weighed by an attention decoder once the stream has ended."""

from oasr_backend.rescoring.attention_decoder import AttentionDecoder, AttentionDecoderConfig
from oasr_backend.rescoring.decoder import NoDecoder, RescoringDecoder
from oasr_backend.rescoring.encoded_frames import EncodedFrames
from oasr_backend.rescoring.rescorer import Rescorer, build_rescorer

__all__ = [
    "AttentionDecoder",
    "AttentionDecoderConfig",
    "EncodedFrames",
    "NoDecoder",
    "Rescorer",
    "RescoringDecoder",
    "build_rescorer",
]
