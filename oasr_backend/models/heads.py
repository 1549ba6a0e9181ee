"""What is made of encoder frames inside the captured step.

Shapes: B streams, T encoder frames, D model, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.models.base import EncoderCaches


class Head(nn.Module):
    """Encoder frames to what a search reads. A search names the head whose output it takes."""

    #: By which a search and a step's output know it.
    name: str
    #: What it keeps of a stream between steps. Names differ from those of the encoder's states.
    state_specs: tuple[StreamStateSpec, ...] = ()

    def step(self, encoded_BTD: Tensor, caches: EncoderCaches) -> Tensor:  # noqa: ARG002
        """What a step calls; a head with states reads and scatters them here, as encoders do."""
        output: Tensor = self(encoded_BTD)
        return output

    def forward(self, encoded_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, ...), frame by frame."""
        raise NotImplementedError(f"{type(self).__name__} has no output")


class CtcHead(Head):
    """One linear layer to logits, one a unit of the vocabulary with the blank."""

    name = "ctc"

    def __init__(self, model_dim: int, vocab_size: int, blank_id: int) -> None:
        super().__init__()
        self.output = nn.Linear(model_dim, vocab_size)
        self.blank_id = blank_id

    @property
    def model_dim(self) -> int:
        return self.output.in_features

    @property
    def vocab_size(self) -> int:
        return self.output.out_features

    def forward(self, encoded_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.output(encoded_BTD)
        return logits_BTV
