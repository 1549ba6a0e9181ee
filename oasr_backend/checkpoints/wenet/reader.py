"""Reads a WeNet U2/U2++ directory as it is: names in, our weights out.

The directory holds `train.yaml`, `final.pt`, `units.txt` and, where the configuration names one,
the CMVN statistics and a SentencePiece model. Without an attention decoder, or with one that cannot
be used, there is no rescoring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasr_backend.checkpoints.base import Checkpoint, CheckpointInfo
from oasr_backend.checkpoints.weights import Weights, load_strictly
from oasr_backend.checkpoints.wenet.biases import supply_zero_biases
from oasr_backend.checkpoints.wenet.cmvn import CmvnFile, choose_cmvn, read_cmvn
from oasr_backend.checkpoints.wenet.config import (
    conformer_config,
    fbank_config,
    read_train_yaml,
    section,
)
from oasr_backend.checkpoints.wenet.decoder import load_decoder
from oasr_backend.checkpoints.wenet.encoder import load_encoder
from oasr_backend.checkpoints.wenet.files import CONFIG, UNITS, WEIGHTS, is_wenet, needed
from oasr_backend.checkpoints.wenet.state_file import read_weights
from oasr_backend.checkpoints.wenet.units import Units, read_units
from oasr_backend.checkpoints.wenet.unused import account_for_rest
from oasr_backend.decoders.base import CTC_SEARCHES
from oasr_backend.errors import CheckpointError
from oasr_backend.features import FbankConfig, KaldiFrontend, LogMelFilterbank
from oasr_backend.models import AcousticModel, ConformerConfig, CtcHead


class WenetReader:
    """Recognises a folder by its `train.yaml`."""

    name = "WeNet"
    file_names = (CONFIG, WEIGHTS, UNITS)

    def recognises(self, path: Path) -> bool:
        return is_wenet(path)

    def open(self, path: Path) -> WenetCheckpoint:
        """Reads every file but `final.pt`.

        Raises CheckpointError naming the file or option that cannot be honoured.
        """
        config = read_train_yaml(needed(path, CONFIG))
        encoder, fbank = conformer_config(config), fbank_config(config)
        return WenetCheckpoint(
            path=path,
            config=config,
            encoder=encoder,
            fbank=fbank,
            units=read_units(path, config),
            cmvn=read_cmvn(path, config, num_bins=fbank.num_mel_bins),
        )


@dataclass(frozen=True)
class WenetCheckpoint:
    """A directory whose `train.yaml`, units and statistics are read and checked.

    `config` is what `train.yaml` holds; `cmvn` is the file of statistics that it names.
    """

    path: Path
    config: Mapping[str, Any]
    encoder: ConformerConfig
    fbank: FbankConfig
    units: Units
    cmvn: CmvnFile | None

    @property
    def info(self) -> CheckpointInfo:
        return CheckpointInfo(
            encoder=self.encoder.spec,
            frames=self.fbank.geometry,
            searches=CTC_SEARCHES,
            vocab_size=self.units.tokenizer.vocab_size,
            tokenizer=self.units.tokenizer,
        )

    def load(self) -> Checkpoint:
        """Reads `final.pt`. Raises CheckpointError naming what in it cannot be honoured."""
        weights = read_weights(needed(self.path, WEIGHTS), described_by=self.path / CONFIG)
        supply_zero_biases(weights, "encoder.", section(self.config, "encoder_conf"))
        head = self._head(weights)
        cmvn = choose_cmvn(self.cmvn, weights, num_bins=self.fbank.num_mel_bins)
        model = AcousticModel(
            KaldiFrontend(LogMelFilterbank(self.fbank), cmvn),
            load_encoder(self.encoder, weights),
            [head],
        )
        decoder = load_decoder(
            self.config, weights, vocab_size=head.vocab_size, model_dim=self.encoder.model_dim
        )
        account_for_rest(weights)
        return Checkpoint(
            model,
            self.units.tokenizer,
            CTC_SEARCHES,
            second_pass=decoder,
            blank_id=self.units.blank_id,
        )

    def _head(self, weights: Weights) -> CtcHead:
        """Raises CheckpointError unless there is an output for each unit."""
        parts = {part: weights.take(f"ctc.ctc_lo.{part}") for part in ("weight", "bias")}
        num_outputs, num_units = parts["weight"].shape[0], self.units.tokenizer.vocab_size
        if num_units != num_outputs:
            raise CheckpointError(
                f"{self.units.path} names {num_units} units, but the CTC head of {weights.path} "
                f"has {num_outputs} outputs; take both files from one training"
            )
        head = CtcHead(self.encoder.model_dim, num_outputs, self.units.blank_id)
        load_strictly(head.output, parts, weights)
        return head
