"""The server's n-gram model, from its file to a scorer."""

from __future__ import annotations

from pathlib import Path

import torch

from oasr_backend.decoders.bias.arpa import load_arpa
from oasr_backend.decoders.bias.ngram import NgramScorer
from oasr_backend.text.tokenizer import Tokenizer


def load_language_model(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    weight: float,
    unit_bonus: float,
    device: torch.device,
) -> NgramScorer:
    """Raises ConfigError for a file that does not fit the tokenizer's units."""
    symbols = tokenizer.pieces(range(tokenizer.vocab_size))
    return NgramScorer(
        load_arpa(path, symbols), weight=weight, unit_bonus=unit_bonus, device=device
    )
