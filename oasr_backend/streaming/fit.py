"""Whether a checkpoint and the settings fit each other; what does not is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.checkpoints import CheckpointInfo
from oasr_backend.config import DecodingSettings, ServingConfig
from oasr_backend.decoders.bias.spelling import HotwordSpelling
from oasr_backend.decoders.option_check import OptionCheck
from oasr_backend.errors import ConfigError, InvalidRequestError
from oasr_backend.models.acoustic_model import AcousticModel
from oasr_backend.models.base import ChunkSettings, EncoderSpec
from oasr_backend.models.transducer import JoinerHead
from oasr_backend.streaming.state_plan import check_state_memory


def check_encoder(spec: EncoderSpec) -> None:
    """Raises ConfigError for an encoder that cannot be served."""
    for state in spec.state_specs:
        if state.persistent:
            raise ConfigError(
                f"the encoder declares {state.name!r} as persistent, and no request can set it: a "
                "prompt that no caller chose would be served; declare it with persistent=False"
            )


def check_defaults(info: CheckpointInfo, config: ServingConfig) -> None:
    """Raises ConfigError for defaults of the server that no stream of it could have.

    Whether the checkpoint can rescore is known once its weights are read.
    """
    units = info.tokenizer
    check = OptionCheck(
        info.searches,
        None if units is None else HotwordSpelling(units, units.vocab_size),
        has_lm=bool(config.search.lm_path),
        no_rescoring="",
    )
    try:
        check.check(config.defaults)
    except InvalidRequestError as error:
        raise ConfigError(f"the defaults of the server's streams: {error}") from error


def heed_blank(model: AcousticModel, search: DecodingSettings) -> None:
    """Raises ConfigError for a setting of the blank that no head of the model heeds."""
    joiners = [head for head in model.heads.values() if isinstance(head, JoinerHead)]
    penalty, threshold = search.blank_penalty, search.blank_threshold
    if threshold != 1.0 and joiners and "ctc" not in model.heads:
        raise ConfigError(
            f"blank_threshold={threshold:g} is the prefix beam's, and the checkpoint has no CTC "
            "head; leave it out"
        )
    if penalty and not joiners:
        raise ConfigError(
            f"blank_penalty={penalty:g} is taken off a transducer's blank, and the checkpoint has "
            "no transducer; leave it out"
        )
    for joiner in joiners:
        joiner.transducer.blank_penalty = penalty


def chunks_of(config: ServingConfig) -> ChunkSettings:
    return ChunkSettings(config.cache.chunk_size, config.cache.num_left_chunks)


def check_states(
    specs: Sequence[StreamStateSpec], config: ServingConfig, device: torch.device
) -> None:
    """Raises ConfigError for states that do not fit the memory."""
    check_state_memory(specs, config, device=device, dtype=getattr(torch, config.model.dtype))
