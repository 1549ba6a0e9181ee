"""Transformer decoder (Vaswani et al., 2017), pre-norm, over token sequences that are known whole.

Shapes: S streams, N hypotheses a stream, L tokens a hypothesis, T encoder frames, D model, H heads,
C head, Q = N * L queries of one stream, M tokens that count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.decoders.second_pass.base import Memory
from oasr_backend.models.conformer import ACTIVATIONS
from oasr_backend.models.layers import FeedForward, sinusoid_table

#: Logits that exist at once; a vocabulary of 5000 takes 6710 tokens at a time.
_MOST_LOGITS = 1 << 25


@dataclass(frozen=True)
class AttentionDecoderConfig:
    """Sizes of one direction; `model_dim` is the encoder's."""

    vocab_size: int
    model_dim: int
    num_layers: int
    num_heads: int
    feed_forward_dim: int
    activation: str = "relu"
    norm_eps: float = 1e-5


class SelfAttention(nn.Module):
    """Each token attends to itself and to those before it in its own hypothesis."""

    def __init__(self, config: AttentionDecoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm = nn.LayerNorm(config.model_dim, eps=config.norm_eps)
        self.qkv = nn.Linear(config.model_dim, 3 * config.model_dim)
        self.project = nn.Linear(config.model_dim, config.model_dim)

    def forward(self, x_SNLD: Tensor) -> Tensor:
        """What attention adds to the residual."""
        qkv_SNLE: Tensor = self.qkv(self.norm(x_SNLD))
        streams, hypotheses, length, _ = x_SNLD.shape
        heads = qkv_SNLE.view(streams * hypotheses, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        change_SNLD: Tensor = self.project(mixed.transpose(1, 2).reshape(x_SNLD.shape))
        return change_SNLD


class CrossAttention(nn.Module):
    """Every token attends to all frames of its stream, whose keys all its hypotheses share."""

    def __init__(self, config: AttentionDecoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.model_dim // config.num_heads
        self.norm = nn.LayerNorm(config.model_dim, eps=config.norm_eps)
        self.query = nn.Linear(config.model_dim, config.model_dim)
        self.key_value = nn.Linear(config.model_dim, 2 * config.model_dim)
        self.project = nn.Linear(config.model_dim, config.model_dim)

    def forward(self, x_SNLD: Tensor, memory: Memory) -> Tensor:
        """What attention adds to the residual."""
        streams, frames, _ = memory.encoded_STD.shape
        query_SNLD: Tensor = self.query(self.norm(x_SNLD))
        query_SHQC = query_SNLD.reshape(streams, -1, self.num_heads, self.head_dim).transpose(1, 2)
        kv_STE: Tensor = self.key_value(memory.encoded_STD)
        heads = kv_STE.view(streams, frames, 2, self.num_heads, self.head_dim)
        key_SHTC, value_SHTC = heads.permute(2, 0, 3, 1, 4)
        mixed_SHQC = F.scaled_dot_product_attention(
            query_SHQC, key_SHTC, value_SHTC, attn_mask=memory.is_real_ST[:, None, None]
        )
        change_SNLD: Tensor = self.project(mixed_SHQC.transpose(1, 2).reshape(x_SNLD.shape))
        return change_SNLD


class DecoderLayer(nn.Module):
    """Self-attention -> cross-attention -> feed-forward, a norm before each."""

    def __init__(self, config: AttentionDecoderConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.cross_attention = CrossAttention(config)
        self.feed_forward = FeedForward(
            config.model_dim,
            config.feed_forward_dim,
            activation=ACTIVATIONS[config.activation],
            norm_eps=config.norm_eps,
        )

    def forward(self, x_SNLD: Tensor, memory: Memory) -> Tensor:
        x_SNLD = x_SNLD + self.self_attention(x_SNLD)
        x_SNLD = x_SNLD + self.cross_attention(x_SNLD, memory)
        change_SNLD: Tensor = self.feed_forward(self.feed_forward.norm(x_SNLD))
        return x_SNLD + change_SNLD


class AttentionDecoder(nn.Module):
    """One direction: embedding * sqrt(D) + sinusoids, the layers, a last norm, the output layer."""

    def __init__(self, config: AttentionDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.model_dim, eps=config.norm_eps)
        self.output = nn.Linear(config.model_dim, config.vocab_size)

    def forward(self, token_SNL: Tensor, memory: Memory) -> Tensor:
        """(S, N, L) tokens to (S, N, L, D) states, of which the output layer makes logits.

        No token sees a later one, so what pads a hypothesis at its end changes nothing before it.
        """
        model_dim = self.config.model_dim
        x_SNLD = self.embedding(token_SNL) * math.sqrt(model_dim)
        x_SNLD = x_SNLD + sinusoid_table(token_SNL.shape[2], model_dim).to(x_SNLD)
        for layer in self.layers:
            x_SNLD = cast(DecoderLayer, layer)(x_SNLD, memory)
        state_SNLD: Tensor = self.norm(x_SNLD)
        return state_SNLD

    def log_probs(self, state_MD: Tensor, target_M: Tensor) -> Tensor:
        """(M,) float32 log-probs of the target tokens."""
        rows = max(1, _MOST_LOGITS // self.config.vocab_size)
        pairs = zip(torch.split(state_MD, rows), torch.split(target_M, rows), strict=True)
        return torch.cat([-self._cross_entropy(state, target) for state, target in pairs])

    def _cross_entropy(self, state_MD: Tensor, target_M: Tensor) -> Tensor:
        return F.cross_entropy(self.output(state_MD).float(), target_M, reduction="none")
