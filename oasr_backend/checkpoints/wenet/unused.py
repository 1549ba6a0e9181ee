"""What a WeNet file may hold beside the tensors that are served; anything else is refused."""

from __future__ import annotations

import logging
import re

from oasr_backend.checkpoints.weights import Weights
from oasr_backend.errors import CheckpointError

logger = logging.getLogger(__name__)

#: Tensors that change no result here, by their names, with the reason.
_IGNORED = (
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


def is_ignored(name: str, *, but: str = "") -> bool:
    """Whether the tensor is on the list, the kind `but` left out."""
    return any(pattern.search(name) for kind, pattern in _IGNORED if kind != but)


def account_for_rest(weights: Weights) -> None:
    """Logs in one line what is not taken and the list allows.

    Raises CheckpointError naming the first tensor that is neither taken nor on the list.
    """
    strays = [weights.name_in_file(name) for name in weights.left if not is_ignored(name)]
    if strays:
        raise CheckpointError(f"{weights.path}: {unused(strays)}")
    if weights.left:
        logger.info("event=tensors_ignored file=%s %s", weights.path, _by_kind(weights.left))


def unused(names: list[str]) -> str:
    """Why tensors without a use are no detail."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]!r}{more} would be unused: train.yaml describes a model without it, whose "
        "results differ; take both files from one training"
    )


def _by_kind(names: list[str]) -> str:
    """Each name counts for the first kind that fits it."""
    found: dict[str, list[str]] = {}
    for name in names:
        kind = next(kind for kind, pattern in _IGNORED if pattern.search(name))
        found.setdefault(kind, []).append(name)
    return " ".join(f"{kind}={len(group)} ({group[0]})" for kind, group in found.items())
