"""Reads icefall directories as they are: shapes give the architecture, names the weights.

A directory holds `pretrained.pt`, or one file of training, and `tokens.txt`; `train_args.json` says
what no shape shows, which is `num_heads` where it is not the usual one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from oasr_backend.checkpoints.base import Checkpoint, CheckpointInfo
from oasr_backend.checkpoints.icefall.architecture import read_architecture
from oasr_backend.checkpoints.icefall.arguments import Arguments, read_arguments
from oasr_backend.checkpoints.icefall.files import (
    OF_TRAINING,
    TOKENS,
    WEIGHTS,
    find_files,
    is_icefall,
)
from oasr_backend.checkpoints.icefall.heads import HeadsConfig, load_heads, read_heads, searches_of
from oasr_backend.checkpoints.icefall.named import load_named
from oasr_backend.checkpoints.icefall.recipes import check_recipe
from oasr_backend.checkpoints.icefall.state_file import read_state_file
from oasr_backend.checkpoints.icefall.training import check_training, with_trained_chunks
from oasr_backend.checkpoints.icefall.units import Units, read_units
from oasr_backend.checkpoints.unused import Kinds, account_for_rest
from oasr_backend.checkpoints.weights import Weights
from oasr_backend.features import ICEFALL_FBANK, IcefallFrontend
from oasr_backend.models import AcousticModel, ChunkedSpec
from oasr_backend.models.zipformer import ZipformerConfig, ZipformerEncoder, icefall_name

#: Tensors of training alone.
_IGNORED: Kinds = (
    # A left-over of each layer: its bypass has a scale of its own.
    ("unused_scales", re.compile(r"^encoder\.encoders\..*\.layers\.\d+\.bypass_scale$")),
    ("training_losses", re.compile(r"^(simple_am_proj|simple_lm_proj|attention_decoder)\.")),
)
_WHY = (
    "icefall's recipe `zipformer` has no such tensor, and results without it would differ; give a "
    "model of that recipe"
)


class IcefallReader:
    """Recognises a folder by the names of its weights and tokens, or the weights file in it."""

    name = "icefall"
    file_names = (f"{WEIGHTS} (or one {' or '.join(OF_TRAINING)})", TOKENS)

    def recognises(self, path: Path) -> bool:
        return is_icefall(path)

    def open(self, path: Path) -> IcefallCheckpoint:
        """Reads every file; of the weights, which are the architecture, the shapes.

        Raises CheckpointError naming the file or argument that cannot be honoured.
        """
        files = find_files(path)
        given = read_arguments(files.arguments)
        averaged = Arguments(given, {}, weights=files.weights, path=files.arguments).flag(
            "use_averaged_model"
        )
        weights, stored = read_state_file(files.weights, averaged=bool(averaged and averaged.value))
        arguments = Arguments(given, stored, weights=files.weights, path=files.arguments)
        check_recipe(weights)
        check_training(arguments)
        units = read_units(files, arguments)
        encoder = read_architecture(weights, arguments)
        return IcefallCheckpoint(
            path=path,
            weights=weights,
            units=units,
            encoder=encoder,
            chunked=with_trained_chunks(encoder, arguments),
            heads=read_heads(weights, arguments, units, model_dim=encoder.model_dim),
        )


@dataclass(frozen=True)
class IcefallCheckpoint:
    """A checkpoint whose sizes are known. `chunked` is the encoder, and what chunks it knows."""

    path: Path
    weights: Weights
    units: Units
    encoder: ZipformerConfig
    chunked: ChunkedSpec
    heads: HeadsConfig

    @cached_property
    def info(self) -> CheckpointInfo:
        return CheckpointInfo(
            encoder=self.chunked,
            frames=ICEFALL_FBANK.geometry,
            searches=searches_of(self.heads),
            vocab_size=self.heads.vocab_size,
            tokenizer=self.units.tokenizer,
        )

    def load(self) -> Checkpoint:
        """Reads the weights. Raises CheckpointError naming what in them cannot be honoured."""
        weights = self.weights.untaken()
        encoder = ZipformerEncoder(self.encoder)
        load_named(encoder, weights, lambda name: icefall_name(name, self.encoder))
        loaded = load_heads(self.heads, weights)
        account_for_rest(weights, _IGNORED, why=_WHY)
        return Checkpoint(
            AcousticModel(IcefallFrontend(), encoder, loaded.heads),
            self.units.tokenizer,
            loaded.searches,
            blank_id=self.units.blank_id,
        )
