"""Audio (or features) in, encoder frames and the heads' outputs out: all that a step runs.

Shapes: B streams, S samples, W feature frames of a window, F features a frame, T encoder frames,
D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from oasr_backend.errors import ConfigError, shown
from oasr_backend.features import Frontend, WindowGeometry
from oasr_backend.models.base import EncoderCaches, EncoderSpec, StreamingEncoder
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
        self._dtype = torch.float32
        # Constant, and some encoders make it anew each time that it is asked for.
        self._spec = encoder.spec

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    def window_geometry(self, chunk_size: int) -> WindowGeometry:
        """The windows, in samples at the model's rate, that give `chunk_size` encoder frames."""
        return WindowGeometry.of(
            self.frontend.geometry,
            chunk_size=chunk_size,
            subsampling=self.spec.subsampling_rate,
            right_context_frames=self.spec.right_context_frames,
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

    def forward_audio(self, samples_BS: Tensor, caches: EncoderCaches) -> ModelOutput:
        """(B, S) samples in [-1, 1] to frames and outputs, in the weights' dtype."""
        return self._forward_normal(self.frontend(samples_BS), caches)

    def forward_features(self, features_BWF: Tensor, caches: EncoderCaches) -> ModelOutput:
        """(B, W, F) features before normalisation to frames and outputs, in the weights' dtype."""
        return self._forward_normal(self.frontend.normalise(features_BWF), caches)

    def _forward_normal(self, normal_BWF: Tensor, caches: EncoderCaches) -> ModelOutput:
        encoded_BTD = self.encoder.forward_chunk(normal_BWF.to(self._dtype), caches)
        self._check_frames(encoded_BTD, normal_BWF)
        outputs = {name: head(encoded_BTD) for name, head in self.heads.items()}
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
