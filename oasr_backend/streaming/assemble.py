"""The composition root: a checkpoint and the settings become the parts of an engine."""

from __future__ import annotations

from oasr_backend.cache import CacheConfig
from oasr_backend.checkpoints import Checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.decoders.base import CTC_SEARCHES, SearchSettings
from oasr_backend.decoders.bias.language_model import load_language_model
from oasr_backend.decoders.group import DecoderGroup
from oasr_backend.decoders.second_pass.base import NoDecoder, SecondPass
from oasr_backend.decoders.second_pass.encoded_frames import EncodedFrames
from oasr_backend.decoders.second_pass.rescorer import Rescorer
from oasr_backend.models.rescoring import RescoringDecoder


def build_rescorer(
    decoder: RescoringDecoder | NoDecoder,
    config: ServingConfig,
    cache_config: CacheConfig,
    *,
    frame_s: float,
) -> SecondPass:
    """Moves the decoder to the device. `frame_s` is the length of an encoder frame."""
    if isinstance(decoder, NoDecoder):
        return decoder
    decoder.prepare(device=cache_config.device, dtype=cache_config.dtype)
    frames = EncodedFrames(
        block_frames=config.chunk_size,
        model_dim=decoder.model_dim,
        max_frames=round(config.rescoring_max_s / frame_s),
        device=cache_config.device,
        dtype=cache_config.dtype,
    )
    return Rescorer(decoder, frames, ctc_weight=config.rescoring_ctc_weight)


def build_decoders(
    checkpoint: Checkpoint, config: ServingConfig, cache_config: CacheConfig, *, frame_s: float
) -> DecoderGroup:
    """Raises ConfigError for an n-gram model that does not fit."""
    tokenizer, device = checkpoint.tokenizer, cache_config.device
    language_model = None
    if config.lm_path:
        language_model = load_language_model(
            config.lm_path,
            tokenizer,
            weight=config.lm_weight,
            unit_bonus=config.lm_unit_bonus,
            device=device,
        )
    return DecoderGroup(
        CTC_SEARCHES,
        SearchSettings(
            device=device,
            blank_id=checkpoint.model.blank_id,
            blank_threshold=config.blank_threshold,
        ),
        tokenizer,
        vocab_size=checkpoint.model.vocab_size,
        second_pass=build_rescorer(checkpoint.decoder, config, cache_config, frame_s=frame_s),
        language_model=language_model,
    )
