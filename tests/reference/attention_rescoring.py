"""Attention rescoring in float64, one hypothesis at a time, by PyTorch's own decoder layer.

Reads a state dict under WeNet's names; shares nothing with the package's own second pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Weights = Mapping[str, Tensor]


@functools.cache
def waves(position: int, dim: int) -> Tensor:
    angles = [position / 10000 ** ((i - i % 2) / dim) for i in range(dim)]
    values = [math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)]
    return torch.tensor(values, dtype=torch.float64)


class ReferenceDecoder:
    """One direction. `name` is what its tensors' names begin with."""

    def __init__(self, weights: Weights, name: str, *, num_heads: int, unit: int) -> None:
        """`unit` is <sos> and <eos>."""
        self._weights = {key: value.double() for key, value in weights.items()}
        self._name, self._num_heads, self._unit = name, num_heads, unit
        self._layers: list[nn.TransformerDecoderLayer] = []
        while f"{name}.decoders.{len(self._layers)}.norm1.weight" in weights:
            self._layers.append(self._layer(f"{name}.decoders.{len(self._layers)}"))

    @torch.no_grad()
    def score(self, tokens: Sequence[int], encoded_TD: Tensor) -> float:
        """log P(tokens, <eos> | frames), token by token."""
        x_1LD = self._embedded([self._unit, *tokens]).unsqueeze(0)
        length = x_1LD.shape[1]
        later_LL = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in self._layers:
            x_1LD = layer(x_1LD, encoded_TD.double().unsqueeze(0), tgt_mask=later_LL)
        norm, output = f"{self._name}.after_norm", f"{self._name}.output_layer"
        normed_LD = nn.functional.layer_norm(
            x_1LD[0], x_1LD.shape[2:], self._of(norm, "weight"), self._of(norm, "bias")
        )
        logits_LV = normed_LD @ self._of(output, "weight").T + self._of(output, "bias")
        log_probs_LV = logits_LV.log_softmax(-1)
        wanted = [*tokens, self._unit]
        return sum(float(log_probs_LV[i, token]) for i, token in enumerate(wanted))

    def _of(self, name: str, kind: str) -> Tensor:
        return self._weights[f"{name}.{kind}"]

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        table_VD = self._of(f"{self._name}.embed.0", "weight")
        dim = table_VD.shape[1]
        rows = []
        for position, token in enumerate(tokens):
            rows.append(table_VD[token] * math.sqrt(dim) + waves(position, dim))
        return torch.stack(rows)

    def _layer(self, name: str) -> nn.TransformerDecoderLayer:
        hidden, dim = self._of(f"{name}.feed_forward.w_1", "weight").shape
        layer = nn.TransformerDecoderLayer(
            dim, self._num_heads, hidden, dropout=0.0, norm_first=True, batch_first=True
        )
        state = {}
        for kind in ("weight", "bias"):
            for new, old in (("self_attn", "self_attn"), ("multihead_attn", "src_attn")):
                parts = [self._of(f"{name}.{old}.linear_{part}", kind) for part in "qkv"]
                state[f"{new}.in_proj_{kind}"] = torch.cat(parts)
                state[f"{new}.out_proj.{kind}"] = self._of(f"{name}.{old}.linear_out", kind)
            for new, old in (("linear1", "w_1"), ("linear2", "w_2")):
                state[f"{new}.{kind}"] = self._of(f"{name}.feed_forward.{old}", kind)
            for norm in ("norm1", "norm2", "norm3"):
                state[f"{norm}.{kind}"] = self._of(f"{name}.{norm}", kind)
        layer.load_state_dict(state)
        return layer.double().eval()


@dataclass(frozen=True)
class ReferenceRescoring:
    """Both directions, or one."""

    left: ReferenceDecoder
    right: ReferenceDecoder | None = None
    reverse_weight: float = 0.0

    def score(self, tokens: Sequence[int], encoded_TD: Tensor) -> float:
        score = self.left.score(tokens, encoded_TD)
        if self.right is None:
            return score
        backwards = self.right.score(list(reversed(tokens)), encoded_TD)
        return (1 - self.reverse_weight) * score + self.reverse_weight * backwards

    def combined(
        self, nbest: Sequence[tuple[Sequence[int], float]], encoded_TD: Tensor, *, ctc_weight: float
    ) -> list[float]:
        """The combined score of each (tokens, score in the beam)."""
        return [self.score(tokens, encoded_TD) + ctc_weight * ctc for tokens, ctc in nbest]
