"""What a search is made with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oasr_backend.decoders.bias.base import PrefixScorer


@dataclass(frozen=True)
class SearchSettings:
    """What a search may need to know of its model, its server and its streams.

    device            where the head's output is, and the search's own tensors
    blank_id          the unit that stands for "nothing"
    beam_size         hypotheses kept per stream
    token_candidates  best units of a frame that may extend a hypothesis, blank and repeats included
    blank_threshold   a CTC search skips frames with P(blank) above it; 1.0 skips none
    scorers           what favours some hypotheses over others
    takes_log_probs   whether a CTC search is given log-probs; a head gives logits
    """

    device: torch.device
    blank_id: int = 0
    beam_size: int = 10
    token_candidates: int = 10
    blank_threshold: float = 1.0
    scorers: tuple[PrefixScorer, ...] = ()
    takes_log_probs: bool = False
