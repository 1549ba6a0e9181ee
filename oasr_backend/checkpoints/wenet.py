"""Loads a WeNet U2/U2++ directory as it is: names in, our weights out.

The directory holds `train.yaml`, `final.pt`, `units.txt` and, where the configuration names one,
the CMVN statistics and a SentencePiece model. Without an attention decoder, or with
one that cannot be used, there is no rescoring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from oasr_backend.checkpoints.files import existing
from oasr_backend.checkpoints.state_file import read_weights
from oasr_backend.checkpoints.unused import account_for_rest
from oasr_backend.checkpoints.weights import load_strictly
from oasr_backend.checkpoints.wenet_biases import supply_zero_biases
from oasr_backend.checkpoints.wenet_cmvn import choose_cmvn
from oasr_backend.checkpoints.wenet_config import (
    conformer_config,
    fbank_config,
    read_train_yaml,
    section,
)
from oasr_backend.checkpoints.wenet_decoder import load_decoder
from oasr_backend.checkpoints.wenet_encoder import load_encoder
from oasr_backend.checkpoints.wenet_units import find_blank, load_units
from oasr_backend.decoders.second_pass.base import NoDecoder
from oasr_backend.features import LogMelFilterbank
from oasr_backend.models.acoustic_model import AcousticModel
from oasr_backend.models.rescoring import RescoringDecoder
from oasr_backend.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model directory: float32 weights on the CPU, not yet prepared for serving."""

    model: AcousticModel
    tokenizer: Tokenizer
    decoder: RescoringDecoder | NoDecoder = field(default_factory=NoDecoder)


def load_wenet(checkpoint_dir: str | Path) -> Checkpoint:
    """Raises CheckpointError naming the file, option or tensor that cannot be honoured."""
    directory = Path(checkpoint_dir)
    config = read_train_yaml(existing(directory, "train.yaml"))
    encoder_config, features = conformer_config(config), fbank_config(config)
    weights = read_weights(existing(directory, "final.pt"))
    supply_zero_biases(weights, "encoder.", section(config, "encoder_conf"))
    head = {part: weights.take(f"ctc.ctc_lo.{part}") for part in ("weight", "bias")}
    vocab_size = head["weight"].shape[0]
    tokenizer = load_units(directory, config, weights, vocab_size=vocab_size)
    model = AcousticModel(
        filterbank=LogMelFilterbank(features),
        cmvn=choose_cmvn(directory, config, weights, num_bins=features.num_mel_bins),
        encoder=load_encoder(encoder_config, weights),
        vocab_size=vocab_size,
        blank_id=find_blank(directory, config, tokenizer),
    )
    load_strictly(model.ctc, head, weights.path)
    decoder = load_decoder(
        config, weights, vocab_size=vocab_size, model_dim=encoder_config.model_dim
    )
    account_for_rest(weights)
    return Checkpoint(model=model, tokenizer=tokenizer, decoder=decoder)
