"""The streaming Zipformer encoder (Yao et al., "Zipformer", 2024, in icefall's causal form).

Shape letters: B rows, W feature frames of a window, F mel bins, c frames of a chunk at 50 Hz,
N = B * c, T = c / 2 encoder frames, D widths, S stacks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.kernels.traced import static
from oasr_backend.models.base import ChunkSettings, EncoderCaches, EncoderSpec, StreamingEncoder
from oasr_backend.models.zipformer.config import (
    EMBED_STATE,
    LAYER_STATES,
    PROCESSED_STATE,
    ZipformerConfig,
)
from oasr_backend.models.zipformer.front_end import FrontEnd
from oasr_backend.models.zipformer.stack import Downsample, LayerStates, ZipformerStack


class ZipformerEncoder(StreamingEncoder):
    """Stacks at several rates and widths behind a convolutional front end.

    A parameter is named as icefall names it, less what `icefall_name` puts in front or between.
    """

    stack_rate_S1: Tensor

    def __init__(self, config: ZipformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder_embed = FrontEnd(config)
        stacks = [ZipformerStack(stack, config.pos_dim) for stack in config.stacks]
        self.encoders = nn.ModuleList(stacks)
        # The same, typed: a ModuleList forgets of which class they are.
        self._stacks = stacks
        self.downsample_output = Downsample(2)
        rates = [[stack.downsampling] for stack in config.stacks]
        self.register_buffer(
            "stack_rate_S1", torch.tensor(rates, dtype=torch.int32), persistent=False
        )
        self._chunks = config.usual_chunks
        self._spec = config.under(self._chunks)

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    def set_chunks(self, chunks: ChunkSettings) -> EncoderSpec:
        """Before `tabulate_positions`. Raises ConfigError as `ZipformerConfig.under` does."""
        self._spec, self._chunks = self.config.under(chunks), chunks
        return self._spec

    def tabulate_positions(self, num_positions: int) -> None:  # noqa: ARG002 - none is absolute
        """Makes constants of what follows from weights and chunks: distances, scales, biases."""
        self.encoder_embed.fold()
        self.downsample_output.fold()
        for stack in self._stacks:
            stack.fold(self.config.frames_of(stack.config, self._chunks))

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        """(B, W, F) to (B, T, D). Windows are whole: `caches.num_new_B` is not heeded."""
        x_ND = self.encoder_embed(features_BWF, caches.states[EMBED_STATE])
        seen_SB = self._count_frames(caches)
        outputs = []
        for number, stack in enumerate(self._stacks):
            x_ND = _of_width(x_ND, stack.config.dim)
            x_ND = self._run_stack(stack, x_ND, seen_SB[number], number, caches)
            outputs.append(x_ND)
        encoded_ND: Tensor = self.downsample_output(_widest(outputs))
        return encoded_ND.view(-1, self._spec.chunk_frames, self._spec.model_dim)

    def _count_frames(self, caches: EncoderCaches) -> Tensor:
        """(S, B): cached frames of each stack that the row has filled, at the stack's rate."""
        state = caches.states[PROCESSED_STATE]
        processed_B = state.gather()
        chunk = self._chunks.chunk_size
        most = chunk * self._chunks.num_left_chunks
        state.scatter((processed_B + chunk).clamp(max=most))
        return torch.div(processed_B, self.stack_rate_S1, rounding_mode="trunc")

    def _run_stack(
        self,
        stack: ZipformerStack,
        x_ND: Tensor,
        num_seen_B: Tensor,
        number: int,
        caches: EncoderCaches,
    ) -> Tensor:
        states = [caches.states[f"{kind}_{number}"] for kind in LAYER_STATES]
        layers = [
            LayerStates(*(state.layer(layer) for state in states))
            for layer in range(stack.config.num_layers)
        ]
        x_ND, newest = stack(x_ND, num_seen_B, layers)
        for state, frames in zip(states, zip(*newest, strict=True), strict=True):
            state.roll_in(torch.stack(frames), axis=2)
        return x_ND


def _of_width(x_ND: Tensor, width: int) -> Tensor:
    """Its first channels, or all of them and zeros behind."""
    given = static(x_ND.shape[1])
    if given > width:
        return x_ND[:, :width].contiguous()
    return x_ND if given == width else F.pad(x_ND, (0, width - given))


def _widest(outputs: list[Tensor]) -> Tensor:
    """The last stack's channels; a wider one before it adds those beyond, and so on backwards."""
    parts, width = [], 0
    for x_ND in reversed(outputs):
        if static(x_ND.shape[1]) > width:
            parts.append(x_ND[:, width:])
            width = static(x_ND.shape[1])
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def icefall_name(name: str, config: ZipformerConfig) -> str:
    """The key in an icefall checkpoint of a parameter of `ZipformerEncoder(config)`.

    Its front end stands beside the encoder, and layers of a lower rate lie one module deeper.
    """
    if name.startswith("encoder_embed."):
        return name
    module, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    if module == "encoders" and inner.startswith("layers."):
        deeper = "encoder." if config.stacks[int(number)].downsampling > 1 else ""
        return f"encoder.encoders.{number}.{deeper}{inner}"
    return f"encoder.{name}"
