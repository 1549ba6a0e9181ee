"""The composition root: a checkpoint and the settings become the parts of an engine."""

from __future__ import annotations

from oasr_backend.cache import CacheConfig
from oasr_backend.config import ServingConfig
from oasr_backend.decoders.second_pass.base import NoDecoder
from oasr_backend.decoders.second_pass.encoded_frames import EncodedFrames
from oasr_backend.decoders.second_pass.rescorer import Rescorer
from oasr_backend.models.rescoring import RescoringDecoder


def build_rescorer(
    decoder: RescoringDecoder | NoDecoder,
    config: ServingConfig,
    cache_config: CacheConfig,
    *,
    frame_s: float,
) -> Rescorer | NoDecoder:
    """Moves the decoder to the device. `frame_s` is the length of an encoder frame."""
    if isinstance(decoder, NoDecoder):
        return decoder
    decoder.prepare(device=cache_config.device, dtype=cache_config.dtype)
    frames = EncodedFrames(
        block_frames=config.cache.chunk_size,
        model_dim=decoder.model_dim,
        max_frames=round(config.search.rescoring_max_s / frame_s),
        device=cache_config.device,
        dtype=cache_config.dtype,
    )
    return Rescorer(decoder, frames, ctc_weight=config.search.rescoring_ctc_weight)
