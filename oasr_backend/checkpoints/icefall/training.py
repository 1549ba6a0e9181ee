"""Arguments of training that no shape shows: each is one that can be served, or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from oasr_backend.checkpoints.icefall.arguments import Arguments, Said, whole_numbers
from oasr_backend.errors import CheckpointError
from oasr_backend.models import ChunkedSpec, ChunkSettings, EncoderSpec

logger = logging.getLogger(__name__)

#: Numbers of which one value can be served, and that value.
_ONLY = {
    "feature_dim": 80,
    "num_mel_bins": 80,
    "num_features": 80,
    "subsampling_factor": 4,
    "output_downsampling_factor": 2,
    "sampling_rate": 16000,
    "sample_rate": 16000,
}
_FEATURES = ("feature", "features", "feature_type")


def check_training(arguments: Arguments) -> None:
    """Raises CheckpointError naming the first argument that cannot be honoured."""
    causal = arguments.flag("causal")
    if causal is not None and not causal.value:
        raise CheckpointError(
            f"{causal.source}: causal=False, so the model was trained with --causal 0, cannot "
            "stream; train with --causal 1, or correct it"
        )
    for name, served in _ONLY.items():
        number = arguments.number(name)
        if number is not None and number.value != served:
            raise _refuse(name, number, served)
    for name in _FEATURES:
        kind = arguments.get(name)
        if kind is not None and "fbank" not in str(kind.value).lower():
            raise _refuse(name, kind, "fbank")


def _refuse(name: str, said: Said, served: object) -> CheckpointError:
    return CheckpointError(
        f"{said.source}: {name}={said.value!r} cannot be served; this backend serves "
        f"{name}={served}. Give a checkpoint trained that way"
    )


@dataclass(frozen=True)
class TrainedChunks:
    """An encoder's needs, and the chunks of its training: those of a server that differ are logged.

    In frames of 20 ms, as icefall's `chunk_size` and `left_context_frames`; empty where unknown.
    """

    encoder: ChunkedSpec
    chunk_sizes: tuple[int, ...]
    left_frames: tuple[int, ...]

    def under(self, chunks: ChunkSettings) -> EncoderSpec:
        spec = self.encoder.under(chunks)
        left = chunks.chunk_size * chunks.num_left_chunks
        _warn("chunk_size", chunks.chunk_size, self.chunk_sizes)
        _warn("chunk_size * num_left_chunks", left, self.left_frames)
        return spec


def with_trained_chunks(encoder: ChunkedSpec, arguments: Arguments) -> ChunkedSpec:
    """The encoder itself where training is not known. Raises CheckpointError for no numbers."""
    sizes, left = (
        () if said is None else tuple(size for size in whole_numbers(name, said) if size > 0)
        for name, said in _said(arguments, ("chunk_size", "left_context_frames"))
    )
    return TrainedChunks(encoder, sizes, left) if sizes or left else encoder


def _said(arguments: Arguments, names: Iterable[str]) -> Iterable[tuple[str, Said | None]]:
    return [(name, arguments.get(name)) for name in names]


def _warn(name: str, chosen: int, trained: tuple[int, ...]) -> None:
    if trained and chosen not in trained:
        logger.warning(
            "event=untrained_chunks %s=%d, and the model was trained with %s frames of 20 ms; its "
            "texts may be worse",
            name,
            chosen,
            " or ".join(map(str, trained)),
        )
