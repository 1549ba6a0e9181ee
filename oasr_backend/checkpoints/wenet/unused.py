"""What a WeNet file may hold beside the tensors that are served; anything else is refused."""

from __future__ import annotations

import re

from oasr_backend.checkpoints import unused as rest
from oasr_backend.checkpoints.weights import Weights

#: Tensors that change no result here, by their names, with the reason.
_IGNORED: rest.Kinds = (
    # Made anew for as many positions as are served.
    ("position_tables", re.compile(r"(\.pos_enc|\.embed\.1)\.pe$")),
    # Batch norm counts its training steps.
    ("training_counters", re.compile(r"\.num_batches_tracked$")),
    # WeNet saves them always and reads them with concat_after=true alone, which is refused.
    ("concat_after", re.compile(r"\.concat_linear[12]?\.(weight|bias)$")),
    # Without rescoring, or a direction of it whose reverse_weight is 0.
    ("attention_decoder", re.compile(r"^decoder\.")),
    # Biasing towards phrases by a network of its own; without phrases it leaves the encoder alone.
    ("context_biasing", re.compile(r"^context_module\.")),
    # Heads of a transducer that was trained beside the CTC head.
    ("transducer", re.compile(r"^(predictor|joint|simple_am_proj|simple_lm_proj)\.")),
)


_WHY = (
    "train.yaml describes a model without it, whose results differ; take both files from one "
    "training"
)


def is_ignored(name: str, *, but: str = "") -> bool:
    """Whether the tensor is on the list, the kind `but` left out."""
    return rest.kind_of(name, [kind for kind in _IGNORED if kind[0] != but]) is not None


def account_for_rest(weights: Weights) -> None:
    """As `checkpoints.unused.account_for_rest` does, by the list of this module."""
    rest.account_for_rest(weights, _IGNORED, why=_WHY)


def unused(names: list[str]) -> str:
    """Why tensors without a use are no detail."""
    return rest.unused(names, why=_WHY)
