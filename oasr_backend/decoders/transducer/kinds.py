"""The searches that a checkpoint with a transducer comes with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from oasr_backend.decoders.base import Search, SearchKind, SearchSettings
from oasr_backend.decoders.rank import by_mean_score
from oasr_backend.decoders.transducer.beam.search import TransducerBeamSearch
from oasr_backend.decoders.transducer.greedy import TransducerGreedySearch
from oasr_backend.decoders.transducer.network import TransducerNetwork
from oasr_backend.errors import ConfigError

TRANSDUCER_GREEDY, TRANSDUCER_BEAM = "transducer_greedy", "transducer_beam"
#: The heads that these searches read, by the names of the searches.
TRANSDUCER_HEADS = MappingProxyType(
    {TRANSDUCER_GREEDY: "transducer_greedy", TRANSDUCER_BEAM: "joiner"}
)


def transducer_searches(network: TransducerNetwork) -> Mapping[str, SearchKind]:
    """By name; the first is what a stream gets that names none."""

    def greedy(settings: SearchSettings) -> Search:
        if settings.scorers:
            raise ConfigError(
                "transducer_greedy weighs no alternatives; leave the scorers out, or use a search "
                "that has a beam"
            )
        return TransducerGreedySearch(network.blank_id)

    kinds = (
        SearchKind(TRANSDUCER_GREEDY, greedy, head=TRANSDUCER_HEADS[TRANSDUCER_GREEDY]),
        SearchKind(
            TRANSDUCER_BEAM,
            partial(TransducerBeamSearch, network),
            head=TRANSDUCER_HEADS[TRANSDUCER_BEAM],
            honours=frozenset({"beam_size", "nbest", "hotwords", "use_lm"}),
            beam_size=4,
            rank=by_mean_score(network.context_size),
        ),
    )
    return MappingProxyType({kind.name: kind for kind in kinds})
