"""Sizes of a Zipformer, and what follows from them and from the server's chunks.

Chunk c and left context L are counted in frames of 20 ms, as the front end gives them; a stack that
works at a lower rate has c / downsampling and L / downsampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.errors import ConfigError, check_whole
from oasr_backend.models.base import ChunkSettings, EncoderSpec

EMBED_STATE = "embed"
PROCESSED_STATE = "processed"
#: States of every layer, in the order of `LayerStates`; their names end in the stack's number.
LAYER_STATES = ("key", "nonlin", "value1", "value2", "conv1", "conv2")
#: Frames behind its own that the front end reads, at 50 Hz.
LOOKAHEAD = 3
_PREFERRED = ChunkSettings(chunk_size=16, num_left_chunks=8)


@dataclass(frozen=True)
class StackConfig:
    """Layers of one width and rate. Raises ConfigError for a size that no layer can have."""

    num_layers: int
    downsampling: int
    dim: int
    num_heads: int
    query_head_dim: int
    position_head_dim: int
    value_head_dim: int
    feed_forward_dims: tuple[int, int, int]
    conv_kernel_size: int

    def __post_init__(self) -> None:
        first, second, third = self.feed_forward_dims
        check_whole(
            "a stack of the Zipformer", least=1,
            num_layers=self.num_layers, downsampling=self.downsampling, num_heads=self.num_heads,
            query_head_dim=self.query_head_dim, position_head_dim=self.position_head_dim,
            value_head_dim=self.value_head_dim, feed_forward_dim=min(first, second, third),
            conv_kernel_size=self.conv_kernel_size,
        )  # fmt: skip
        check_whole("a stack of the Zipformer", least=2, dim=self.dim)
        if self.conv_kernel_size % 2 == 0:
            raise ConfigError(
                f"a stack of the Zipformer: conv_kernel_size={self.conv_kernel_size} is even; "
                "give an odd one, which has a middle"
            )

    @property
    def nonlin_dim(self) -> int:
        """Width of the nonlinear attention."""
        return 3 * self.dim // 4

    @property
    def state_frames(self) -> int:
        """Frames before the chunk that a convolution reads."""
        return self.conv_kernel_size // 2


@dataclass(frozen=True)
class StackFrames:
    """Frames of a stack's chunk and of its left context, at the stack's rate."""

    chunk: int
    left: int


@dataclass(frozen=True)
class ZipformerConfig:
    """Sizes of one checkpoint. `conv_channels` are those of the front end's three convolutions.

    Raises ConfigError for no stacks and for sizes that no encoder can have.
    """

    stacks: tuple[StackConfig, ...]
    pos_dim: int
    conv_channels: tuple[int, int, int]
    num_mel_bins: int = 80

    def __post_init__(self) -> None:
        first, second, third = self.conv_channels
        check_whole("the Zipformer", least=1, conv_channels=min(first, second, third))
        check_whole("the Zipformer", least=2, pos_dim=self.pos_dim)
        check_whole("the Zipformer", least=7, num_mel_bins=self.num_mel_bins)
        if not self.stacks:
            raise ConfigError("the Zipformer: stacks=() is empty; give one stack or more")
        if self.pos_dim % 2:
            raise ConfigError(
                f"the Zipformer: pos_dim={self.pos_dim} is odd; give an even one, since positions "
                "are pairs of a cosine and a sine"
            )

    @property
    def model_dim(self) -> int:
        """Of the encoder's frames: the widest stack's."""
        return max(stack.dim for stack in self.stacks)

    @property
    def embed_columns(self) -> int:
        """Mel columns that are left behind the front end's convolutions, two of stride 2."""
        return ((self.num_mel_bins - 1) // 2 - 1) // 2

    @property
    def chunk_multiple(self) -> int:
        """Every stack, and the output at 25 Hz, has whole frames of a multiple of it."""
        return math.lcm(2, *(stack.downsampling for stack in self.stacks))

    @property
    def usual_chunks(self) -> ChunkSettings:
        """Of a server that was told nothing else: 16 and 8, or the least chunk that is allowed."""
        if _PREFERRED.chunk_size % self.chunk_multiple == 0:
            return _PREFERRED
        return ChunkSettings(self.chunk_multiple, _PREFERRED.num_left_chunks)

    def under(self, chunks: ChunkSettings) -> EncoderSpec:
        """What the encoder reads and keeps; `chunk_size` is in frames of 20 ms, as icefall's.

        Raises ConfigError for a chunk that some stack would have no whole frames of, and for a left
        context that is empty or unlimited.
        """
        self._check(chunks)
        return EncoderSpec(
            model_dim=self.model_dim,
            subsampling_rate=4,
            right_context_frames=16,
            state_specs=tuple(self._states(chunks)),
            chunk_frames=chunks.chunk_size // 2,
        )

    def frames_of(self, stack: StackConfig, chunks: ChunkSettings) -> StackFrames:
        """Of one stack, under settings that `under` accepts."""
        chunk = chunks.chunk_size // stack.downsampling
        return StackFrames(chunk, chunk * chunks.num_left_chunks)

    def _check(self, chunks: ChunkSettings) -> None:
        multiple, chunk_size = self.chunk_multiple, chunks.chunk_size
        if chunk_size < 1 or chunk_size % multiple:
            rates = ", ".join(str(stack.downsampling) for stack in self.stacks)
            raise ConfigError(
                f"chunk_size={chunk_size} is no multiple of {multiple}, which this Zipformer needs "
                f"for whole output frames and stacks that average {rates} frames; set chunk_size "
                f"to {multiple}, {2 * multiple}, {3 * multiple} or another multiple of {multiple}"
            )
        if chunks.num_left_chunks < 1:
            raise ConfigError(
                f"num_left_chunks={chunks.num_left_chunks}, but a Zipformer keeps a left context "
                "of fixed length, at least one chunk; set num_left_chunks to 1 or more, so that "
                f"chunk_size * num_left_chunks is a left context in training, such as "
                f"{max(1, 128 // chunk_size)} for {max(1, 128 // chunk_size) * chunk_size} frames"
            )

    def _states(self, chunks: ChunkSettings) -> Iterator[StreamStateSpec]:
        for number, stack in enumerate(self.stacks):
            left = self.frames_of(stack, chunks).left
            value = (left, stack.num_heads * stack.value_head_dim)
            conv = (stack.state_frames, stack.dim)
            key, nonlin = (left, stack.num_heads * stack.query_head_dim), (left, stack.nonlin_dim)
            shapes = (key, nonlin, value, value, conv, conv)
            for kind, shape in zip(LAYER_STATES, shapes, strict=True):
                yield StreamStateSpec(f"{kind}_{number}", (stack.num_layers, *shape), slot_axis=1)
        embed = (self.conv_channels[-1], LOOKAHEAD, self.embed_columns)
        yield StreamStateSpec(EMBED_STATE, embed)
        yield StreamStateSpec(PROCESSED_STATE, (), dtype=torch.int32)
