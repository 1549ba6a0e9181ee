"""What a streaming encoder declares and what a step hands to it.

Three families fit the same contract:
* attention over a growing or sliding history, and declared states (Conformer);
* attention over a window of trained length, which a stream starts with, zeroed (`TrainedWindow`:
  FastConformer, Nemotron);
* declared states alone, without attention (`attention` None: Zipformer).

Shapes: B rows (streams) of a step, W feature frames of a window, F features a frame, T encoder
frames, D model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor, nn

from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.cache.state import StagedSlotTensor, StreamStateSpec
from oasr_backend.errors import ConfigError, check_whole

_ENCODER = "the encoder's spec"


@dataclass(frozen=True)
class LeftChunks:
    """Attention sees as many past chunks as the server's `num_left_chunks` says."""


@dataclass(frozen=True)
class TrainedWindow:
    """Attention sees the `frames` encoder frames before the chunk; no setting changes it.

    Raises ConfigError for fewer than one.
    """

    frames: int

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise ConfigError(f"a trained window of {self.frames} frames; it has 1 or more")


@dataclass(frozen=True)
class AttentionSpec:
    """The K/V history of an encoder. Raises ConfigError for a size below 1."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    span: LeftChunks | TrainedWindow = field(default_factory=LeftChunks)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"attention has {name}={getattr(self, name)}, below 1; an encoder without "
                    "attention declares attention=None"
                )


@dataclass(frozen=True)
class ChunkSettings:
    """The server's `chunk_size` and `num_left_chunks`, in the words of the checkpoint's toolkit."""

    chunk_size: int
    num_left_chunks: int


class ChunkedSpec(Protocol):
    """What an encoder reads and keeps, where that follows from the server's settings too."""

    def under(self, chunks: ChunkSettings) -> EncoderSpec:
        """Raises ConfigError for settings that the encoder was not made for, by their names."""


@dataclass(frozen=True)
class EncoderSpec:
    """The geometry of an encoder: what it reads in a step and what it keeps between steps.

    model_dim             width of the frames that it gives
    subsampling_rate      feature frames per encoder frame
    right_context_frames  feature frames after its first that an encoder frame needs
    attention             its K/V history; None for an encoder without
    state_specs           what else it keeps of a stream, by name
    chunk_sizes           values of `chunk_size` that it was trained with; empty: any
    chunk_frames          encoder frames a step; 0: as many as `chunk_size` says

    Raises ConfigError, by the field's name, for a size that is no whole number or is below 1, for a
    right context that would lose frames between two windows, and for names of states that repeat.
    """

    model_dim: int
    subsampling_rate: int
    right_context_frames: int
    attention: AttentionSpec | None = None
    state_specs: tuple[StreamStateSpec, ...] = ()
    chunk_sizes: tuple[int, ...] = ()
    chunk_frames: int = 0

    def __post_init__(self) -> None:
        rate = self.subsampling_rate
        check_whole(_ENCODER, least=1, model_dim=self.model_dim, subsampling_rate=rate)
        check_whole(_ENCODER, least=0, right_context_frames=self.right_context_frames)
        check_whole(_ENCODER, least=0, chunk_frames=self.chunk_frames)
        for chunk_size in self.chunk_sizes:
            check_whole(_ENCODER, least=1, chunk_sizes=chunk_size)
        if self.right_context_frames < rate - 1:
            raise ConfigError(
                f"{_ENCODER}: right_context_frames={self.right_context_frames} is below "
                f"{rate - 1}, so that windows of subsampling_rate={rate} would skip frames; "
                f"give {rate - 1} or more"
            )
        names = [state.name for state in self.state_specs]
        if "" in names or len(set(names)) < len(names):
            raise ConfigError(
                f"{_ENCODER}: state_specs are named {names}; give each a name of its own"
            )

    def under(self, chunks: ChunkSettings) -> EncoderSpec:
        """With the frames of a step. Raises ConfigError for a chunk size of no training."""
        check_chunk_size(self, chunks.chunk_size)
        return replace(self, chunk_frames=self.chunk_frames or chunks.chunk_size)

    def num_encoder_frames(self, window_frames: int) -> int:
        """T of a whole window of so many feature frames."""
        return (window_frames - self.right_context_frames - 1) // self.subsampling_rate + 1


def check_chunk_size(spec: EncoderSpec, chunk_size: int) -> None:
    """Raises ConfigError for a chunk size that the encoder was not trained with."""
    if spec.chunk_sizes and chunk_size not in spec.chunk_sizes:
        trained = " or ".join(map(str, spec.chunk_sizes))
        raise ConfigError(
            f"chunk_size={chunk_size}, but the encoder was trained with chunks of {trained} frames "
            f"alone; set chunk_size to {trained}"
        )


@dataclass(frozen=True)
class EncoderCaches:
    """The cached state of one step's rows, the same row order in every part.

    kv: one view a layer; all share one layout, so index arithmetic is done once a step. Empty for
    an encoder without attention.
    first_key_position_B: absolute position of each row's oldest visible key.
    num_new_B: real new frames of each row; behind them a row's window is padding.
    states: the declared states by name; what is scattered is stored at the step's end.
    """

    kv: Sequence[PagedKVCache]
    first_key_position_B: Tensor
    num_new_B: Tensor
    states: Mapping[str, StagedSlotTensor] = field(default_factory=dict)

    def store(self) -> None:
        """Stores what was scattered into the declared states."""
        for state in self.states.values():
            state.store()


class StreamingEncoder(nn.Module, ABC):
    """One chunk of many streams at once. Holds weights, never a stream's state."""

    @property
    @abstractmethod
    def spec(self) -> EncoderSpec:
        """What the encoder reads and keeps; constant once `set_chunks` was called."""

    def set_chunks(self, chunks: ChunkSettings) -> EncoderSpec:
        """What it reads and keeps under these settings; called once, before anything is served.

        An encoder whose `spec` follows from them overrides this. Raises ConfigError as
        `EncoderSpec.under` does.
        """
        return self.spec.under(chunks)

    def tabulate_positions(self, num_positions: int) -> None:
        """Builds what depends on absolute positions 0 .. num_positions - 1.

        Called once, in float32, before serving. An encoder without positions leaves it as it is.
        """

    @abstractmethod
    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        """(B, W, F) feature windows to (B, T, D) encoder frames. Rows never see each other.

        Changes nothing that a second call would not write again: K/V rows go where the layout
        says, and states that are scattered wait until the whole step has succeeded.
        """
