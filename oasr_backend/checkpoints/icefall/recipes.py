"""Models of other recipes, told by the names of their tensors: each is refused by its own name."""

from __future__ import annotations

import re

from oasr_backend.checkpoints.weights import Weights
from oasr_backend.errors import CheckpointError

_SERVED = "give a streaming model of icefall's recipe `zipformer`, which this backend serves"
#: Patterns of names, what has such tensors, and what to do; the first that fits counts.
_FOREIGN = tuple(
    (re.compile(pattern), what, remedy)
    for pattern, what, remedy in (
        (
            r"lora_|\.lora\.|(^|[._])adapters?([._]|$)",
            "it is an adaptation (LoRA or adapters) beside the weights it adapts",
            "merge it into the weights and export those",
        ),
        (
            r"^encoder\.(encoder_embed|skip_modules)\.",
            "it is the older Zipformer of pruned_transducer_stateless7 or ..._streaming",
            _SERVED,
        ),
        (r"emformer_layers\.", "it is an Emformer", _SERVED),
        (r"^encoder\..*\.lstm\.|^encoder\.rnn", "it is an LSTM encoder", _SERVED),
        (r"pos_bias_u$|feed_forward_macaron\.", "it is a Conformer", _SERVED),
        (r"^encoder\.(blocks|conv1|positional_embedding)\b", "it is a Whisper encoder", _SERVED),
        (r"^ctc\.ctc_lo\.", "it is a WeNet model", "put its train.yaml and units.txt beside it"),
        (r"^(decoder|predictor)\.(rnn|lstm|gru)\b", "it has a predictor with an RNN", _SERVED),
        (
            r"^encoder\.encoders\..*\.depthwise_conv\.weight$",
            "this Zipformer was trained with --causal 0, cannot stream",
            "train with --causal 1, or give the checkpoint of a streaming model",
        ),
    )
)


def check_recipe(weights: Weights) -> None:
    """Raises CheckpointError naming what the model is, unless it is a streaming Zipformer."""
    names = weights.names
    for pattern, what, remedy in _FOREIGN:
        found = next((name for name in names if pattern.search(name)), None)
        if found is not None:
            raise CheckpointError(
                f"{weights.path} holds {weights.name_in_file(found)!r}: {what}; {remedy}"
            )
    if not any(name.startswith("encoder.encoders.") for name in names):
        first = ", ".join(repr(name) for name in names[:3]) or "no tensors"
        raise CheckpointError(
            f"{weights.path} holds {first} and nothing under 'encoder.encoders.'; {_SERVED}"
        )
