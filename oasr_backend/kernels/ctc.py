"""The best token of every frame and its log-probability, straight from the scores.

Shape letters: B rows, T frames, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oasr_backend.kernels.launch import use_kernel


def best_tokens(scores_BTV: Tensor) -> Tensor:
    """int32 (2, B, T): ids, and the bits of their float32 log-probabilities.

    `scores_BTV` are logits or log-probabilities: normalising twice changes nothing.
    """
    if not use_kernel(scores_BTV):
        return best_tokens_definition(scores_BTV)
    from oasr_backend.kernels.ctc_kernel import launch_best_tokens

    return launch_best_tokens(scores_BTV)


def best_tokens_definition(scores_BTV: Tensor) -> Tensor:
    scores_BTV = scores_BTV.float()
    best_BT, id_BT = scores_BTV.max(dim=-1)
    log_prob_BT = best_BT - scores_BTV.logsumexp(dim=-1)
    return torch.stack((id_BT.to(torch.int32), log_prob_BT.view(torch.int32)))
