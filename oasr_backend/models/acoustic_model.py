"""Audio (or features) in, encoder frames and the heads' outputs out: all that a step runs.

Shapes: B streams, S samples, W feature frames of a window, F features a frame, T encoder frames,
D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.errors import ConfigError, shown
from oasr_backend.features import Frontend, WindowGeometry
from oasr_backend.models.base import ChunkSettings, EncoderCaches, EncoderSpec, StreamingEncoder
from oasr_backend.models.heads import Head


class ModelOutput(NamedTuple):
    """One step's rows: the encoder's frames, and what each head makes of them, by its name."""

    encoded_BTD: Tensor
    heads: dict[str, Tensor]

    def first(self, num_rows: int) -> ModelOutput:
        """Views."""
        heads = {name: output[:num_rows] for name, output in self.heads.items()}
        return ModelOutput(self.encoded_BTD[:num_rows], heads)

    @classmethod
    def cat(cls, parts: Sequence[ModelOutput]) -> ModelOutput:
        """The rows of one part after those of another."""
        encoded_BTD = torch.cat([part.encoded_BTD for part in parts])
        names = parts[0].heads
        return cls(encoded_BTD, {name: torch.cat([p.heads[name] for p in parts]) for name in names})


class AcousticModel(nn.Module):
    """Front end -> encoder -> heads. Holds weights, never per-stream state.

    Features are float32; the encoder's dtype may be another.
    """

    def __init__(
        self, frontend: Frontend, encoder: StreamingEncoder, heads: Sequence[Head]
    ) -> None:
        """Raises ConfigError for no head, or two of one name."""
        super().__init__()
        names = [head.name for head in heads]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"the heads are named {names}; give one or more, each its own name")
        self.frontend = frontend
        self.encoder = encoder
        self.heads = nn.ModuleDict(dict(zip(names, heads, strict=True)))
        # The same, typed: a ModuleDict forgets of which class they are.
        self._head_of: dict[str, Head] = dict(zip(names, heads, strict=True))
        self._head_states = tuple(spec for head in heads for spec in head.state_specs)
        self._dtype = torch.float32
        # Constant, and some encoders make it anew each time that it is asked for.
        self._spec = encoder.spec

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    @property
    def state_specs(self) -> tuple[StreamStateSpec, ...]:
        """Every declared state: those of the encoder, then those of the heads."""
        return (*self.spec.state_specs, *self._head_states)

    def set_chunks(self, chunks: ChunkSettings) -> None:
        """Fixes what a step reads. Raises ConfigError for settings that the encoder refuses."""
        self._spec = self.encoder.set_chunks(chunks)

    def window_geometry(self) -> WindowGeometry:
        """The windows of a step, in samples at the model's rate; known once chunks are set."""
        padding = self.frontend.padding
        return WindowGeometry.of(
            self.frontend.geometry,
            chunk_frames=self.spec.chunk_frames,
            subsampling=self.spec.subsampling_rate,
            right_context_frames=self.spec.right_context_frames,
            tail_frames=None if padding is None else padding.tail_frames,
        )

    def prepare(self, *, device: torch.device, dtype: torch.dtype, num_positions: int) -> None:
        """Moves the weights to where they are served and builds the position tables there."""
        self.eval().requires_grad_(False)
        if dtype == torch.float32:
            # Convolutions would otherwise round their factors to ten bits.
            torch.backends.cudnn.allow_tf32 = False
        # Tables are projected in float32, then rounded once.
        self.encoder.tabulate_positions(num_positions)
        self.to(device)
        self.encoder.to(dtype)
        self.heads.to(dtype)
        self._dtype = dtype

    def forward_audio(
        self, samples_BS: Tensor, caches: EncoderCaches, num_real_B: Tensor
    ) -> ModelOutput:
        """(B, S) samples in [-1, 1] to frames and outputs, in the weights' dtype.

        The first `num_real_B` (B,) int64 feature frames of a window have their samples in it.
        """
        return self.forward_features(self.frontend.features(samples_BS), caches, num_real_B)

    def forward_features(
        self, features_BWF: Tensor, caches: EncoderCaches, num_real_B: Tensor
    ) -> ModelOutput:
        """(B, W, F) features before padding and normalisation to frames and outputs."""
        padded_BWF = self.frontend.pad(features_BWF, num_real_B)
        return self._forward_normal(self.frontend.normalise(padded_BWF), caches)

    def _forward_normal(self, normal_BWF: Tensor, caches: EncoderCaches) -> ModelOutput:
        encoded_BTD = self.encoder.forward_chunk(normal_BWF.to(self._dtype), caches)
        self._check_frames(encoded_BTD, normal_BWF)
        outputs = {name: head.step(encoded_BTD, caches) for name, head in self._head_of.items()}
        # Last, so that a step that runs out of memory can be tried again in halves.
        caches.store()
        return ModelOutput(encoded_BTD, outputs)

    def _check_frames(self, encoded_BTD: Tensor, normal_BWF: Tensor) -> None:
        """Raises ConfigError for other frames than the spec says. Looks at shapes only."""
        num_rows, window_frames, _ = normal_BWF.shape
        expected = (num_rows, self._spec.num_encoder_frames(window_frames), self._spec.model_dim)
        found = getattr(encoded_BTD, "shape", encoded_BTD)
        if found != expected:
            given = tuple(found) if isinstance(found, torch.Size) else shown(found)
            raise ConfigError(
                f"forward_chunk of {type(self.encoder).__name__} gave {given} for {window_frames} "
                f"feature frames, where its spec says (rows, frames, model_dim) = {expected}; mend "
                "forward_chunk or the spec"
            )
