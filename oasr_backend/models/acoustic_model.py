"""Audio (or features) in, encoder frames and CTC logits out: all that a step runs."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from oasr_backend.features import GlobalCmvn, LogMelFilterbank, WindowGeometry
from oasr_backend.models import EncoderCaches, EncoderSpec, StreamingEncoder


class ModelOutput(NamedTuple):
    """One step's rows: the encoder's frames, and what the CTC head makes of them."""

    encoded_BTD: Tensor
    logits_BTV: Tensor

    def first(self, num_rows: int) -> ModelOutput:
        """Views."""
        return ModelOutput(self.encoded_BTD[:num_rows], self.logits_BTV[:num_rows])


class AcousticModel(nn.Module):
    """Filterbank -> CMVN -> encoder -> CTC head. Holds weights, never per-stream state.

    Features are float32 whatever the encoder's dtype.
    """

    def __init__(
        self,
        *,
        filterbank: LogMelFilterbank,
        cmvn: GlobalCmvn | None,
        encoder: StreamingEncoder,
        vocab_size: int,
        blank_id: int,
    ) -> None:
        super().__init__()
        self.filterbank = filterbank
        self.cmvn = cmvn
        self.encoder = encoder
        self.ctc = nn.Linear(encoder.spec.model_dim, vocab_size)
        self.blank_id = blank_id

    @property
    def spec(self) -> EncoderSpec:
        return self.encoder.spec

    @property
    def vocab_size(self) -> int:
        return self.ctc.out_features

    def window_geometry(self, chunk_size: int) -> WindowGeometry:
        """The windows, in samples at the model's rate, that give `chunk_size` encoder frames."""
        spec, frames = self.spec, self.filterbank.config
        return WindowGeometry(
            window_frames=spec.window_frames(chunk_size),
            stride_frames=spec.stride_frames(chunk_size),
            min_frames=spec.min_window_frames,
            subsampling=spec.subsampling_rate,
            frame_length_samples=frames.frame_length_samples,
            frame_shift_samples=frames.frame_shift_samples,
            sample_rate=frames.sample_rate,
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
        cast(nn.Module, self.encoder).to(dtype)
        self.ctc.to(dtype)

    def forward_audio(self, samples_BS: Tensor, caches: EncoderCaches) -> ModelOutput:
        """(B, S) samples in [-1, 1] to frames and logits, in the weights' dtype."""
        return self.forward_features(self.filterbank(samples_BS), caches)

    def forward_features(self, features_BWF: Tensor, caches: EncoderCaches) -> ModelOutput:
        """(B, W, F) log-mel features to frames and logits, in the weights' dtype."""
        if self.cmvn is not None:
            features_BWF = self.cmvn(features_BWF)
        encoded_BTD, conv_LBKD = self.encoder.forward_chunk(
            features_BWF.to(self.ctc.weight.dtype), caches
        )
        logits_BTV: Tensor = self.ctc(encoded_BTD)
        # Last, so that a step that runs out of memory can be tried again in halves.
        caches.store(conv_LBKD)
        return ModelOutput(encoded_BTD, logits_BTV)
