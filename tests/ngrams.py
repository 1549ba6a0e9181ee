"""ARPA files from a dictionary, and a walk over the units of a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from oasr_backend.decoders.bias.arpa import load_arpa
from oasr_backend.decoders.bias.ngram import NgramScorer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SYMBOLS = ["<blank>", "\u2581A", "B", "C", "\u2581D"]
Entries = Mapping[tuple[str, ...], tuple[float, float]]


def arpa(entries: Entries) -> str:
    """The file of entries n-gram -> (log10 probability, log10 backoff)."""
    order = max(map(len, entries))
    sections = []
    for n in range(1, order + 1):
        lines = [
            f"{log_prob:.6f}\t{' '.join(ngram)}" + (f"\t{backoff:.6f}" if n < order else "")
            for ngram, (log_prob, backoff) in entries.items()
            if len(ngram) == n
        ]
        sections.append("\n".join([f"\\{n}-grams:", *lines, ""]))
    sizes = Counter(map(len, entries))
    counts = [f"ngram {n}={sizes[n]}" for n in range(1, order + 1)]
    return "\n".join(["\\data\\", *counts, "", *sections, "\\end\\", ""])


def write(folder: Path, text: str) -> Path:
    path = folder / "lm.arpa"
    path.write_text(text, encoding="utf-8")
    return path


def walk(scorer: NgramScorer, text: Sequence[int]) -> float:
    state_NB, total = torch.full((1, 1), scorer.initial_state, device=DEVICE), 0.0
    for unit in text:
        chunk = scorer.for_chunk(np.zeros(1, np.int64))
        looked = chunk.look_up(torch.tensor([[[-1, unit]]], device=DEVICE))
        gain_NBC, next_NBC = chunk.extend(looked, state_NB)
        total, state_NB = total + float(gain_NBC[0, 0, 1]), next_NBC[..., 1]
    return total


def scorer_of(
    path: Path,
    *,
    weight: float = 1.0,
    unit_bonus: float = 0.0,
    symbols: Sequence[str] = SYMBOLS,
    device: torch.device = DEVICE,
) -> NgramScorer:
    model = load_arpa(path, symbols)
    return NgramScorer(model, weight=weight, unit_bonus=unit_bonus, device=device)
