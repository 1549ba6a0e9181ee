"""The heads of an icefall model: a CTC output, a transducer, or both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from oasr_backend.checkpoints.icefall.architecture import check_said, dims_of
from oasr_backend.checkpoints.icefall.arguments import Arguments
from oasr_backend.checkpoints.icefall.named import load_named
from oasr_backend.checkpoints.icefall.units import Units, check_vocabulary
from oasr_backend.checkpoints.weights import Weights
from oasr_backend.decoders.base import CTC_SEARCHES, SearchKind
from oasr_backend.decoders.transducer.kinds import transducer_searches
from oasr_backend.errors import CheckpointError, ConfigError
from oasr_backend.models import CtcHead, Head
from oasr_backend.models.transducer import (
    GROUP_CHANNELS,
    GreedyTransducerHead,
    JoinerHead,
    Transducer,
    TransducerConfig,
)

logger = logging.getLogger(__name__)

_CTC = "ctc_output.1."
_EMBEDDING, _CONVOLUTION = "decoder.embedding.weight", "decoder.conv.weight"


@dataclass(frozen=True)
class HeadsConfig:
    """Sizes of the heads that there are: `transducer` or `has_ctc`, or both."""

    model_dim: int
    vocab_size: int
    blank_id: int
    has_ctc: bool
    transducer: TransducerConfig | None

    @property
    def names(self) -> tuple[str, ...]:
        return ("transducer",) * (self.transducer is not None) + ("ctc",) * self.has_ctc


@dataclass(frozen=True)
class LoadedHeads:
    heads: list[Head]
    searches: Mapping[str, SearchKind]


def read_heads(
    weights: Weights, arguments: Arguments, units: Units, *, model_dim: int
) -> HeadsConfig:
    """Sizes by the tensors' shapes, with one log line of which heads there are.

    Raises CheckpointError for no head, and for sizes that the tokens or the arguments contradict.
    """
    has_ctc = any(name.startswith("ctc_output.") for name in weights.names)
    has_joiner = any(name.startswith("joiner.") for name in weights.names)
    if not has_ctc and not has_joiner:
        raise CheckpointError(
            f"{weights.path} holds neither 'ctc_output.1.weight' nor 'joiner.*'; give a model with "
            "a CTC head or a transducer"
        )
    _check_told(arguments, weights, use_ctc=has_ctc, use_transducer=has_joiner)
    vocab_size = units.tokenizer.vocab_size
    if has_ctc:
        check_vocabulary(units, dims_of(weights, f"{_CTC}weight", 2)[0], f"{_CTC}weight")
    transducer = None
    if has_joiner:
        transducer = _transducer(weights, arguments, units, model_dim=model_dim)
    check_said(arguments, "vocab_size", (vocab_size,), weights)
    config = HeadsConfig(model_dim, vocab_size, units.blank_id, has_ctc, transducer)
    logger.info(
        "event=icefall_heads file=%s heads=%s default=%s",
        weights.path,
        ",".join(config.names),
        config.names[0],
    )
    return config


def searches_of(config: HeadsConfig) -> Mapping[str, SearchKind]:
    """By name, the default first. Their network has no weights yet."""
    if config.transducer is None:
        return CTC_SEARCHES
    return _searches(config, Transducer(config.transducer))


def load_heads(config: HeadsConfig, weights: Weights) -> LoadedHeads:
    """Raises CheckpointError naming a tensor that is missing or of another shape."""
    heads: list[Head] = []
    searches: Mapping[str, SearchKind] = CTC_SEARCHES
    if config.transducer is not None:
        transducer = Transducer(config.transducer)
        load_named(transducer, weights, lambda name: name)
        heads += [GreedyTransducerHead(transducer), JoinerHead(transducer)]
        searches = _searches(config, transducer)
    if config.has_ctc:
        head = CtcHead(config.model_dim, config.vocab_size, config.blank_id)
        load_named(head.output, weights, lambda name: _CTC + name)
        heads.append(head)
    return LoadedHeads(heads, searches)


def _searches(config: HeadsConfig, transducer: Transducer) -> Mapping[str, SearchKind]:
    of_ctc = CTC_SEARCHES if config.has_ctc else {}
    return MappingProxyType({**transducer_searches(transducer), **of_ctc})


def _check_told(arguments: Arguments, weights: Weights, **there: bool) -> None:
    """Raises CheckpointError where an argument speaks of another head than there is."""
    for name, is_there in there.items():
        said = arguments.flag(name)
        if said is not None and said.value != is_there:
            what = "has that head" if is_there else "has no such head"
            raise CheckpointError(
                f"{said.source}: {name}={said.value}, but {weights.path} {what}; take both from "
                "one training, or correct it"
            )


def _transducer(
    weights: Weights, arguments: Arguments, units: Units, *, model_dim: int
) -> TransducerConfig:
    output = "joiner.output_linear.weight"
    num_outputs, joiner_dim = dims_of(weights, output, 2)
    num_embeddings, embedding_dim = dims_of(weights, _EMBEDDING, 2)
    check_vocabulary(units, num_outputs, output)
    check_vocabulary(units, num_embeddings, _EMBEDDING)
    context_size = _context_size(weights)
    for name, size in (
        ("context_size", context_size),
        ("decoder_dim", embedding_dim),
        ("joiner_dim", joiner_dim),
    ):
        check_said(arguments, name, (size,), weights)
    try:
        return TransducerConfig(
            model_dim=model_dim,
            joiner_dim=joiner_dim,
            embedding_dim=embedding_dim,
            vocab_size=num_outputs,
            context_size=context_size,
            blank_id=units.blank_id,
        )
    except ConfigError as error:
        raise CheckpointError(f"{weights.path}: {error}") from error


def _context_size(weights: Weights) -> int:
    """Tokens that the predictor reads: without a convolution, one."""
    if _CONVOLUTION not in weights:
        return 1
    _, channels, context_size = dims_of(weights, _CONVOLUTION, 3)
    if channels != GROUP_CHANNELS:
        raise CheckpointError(
            f"{weights.path}: {_CONVOLUTION} has groups of {channels} channels, and this backend "
            f"serves {GROUP_CHANNELS}; give a model of icefall's recipe `zipformer`"
        )
    return context_size
