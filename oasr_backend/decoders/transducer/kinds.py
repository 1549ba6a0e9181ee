"""The searches that a checkpoint with a transducer comes with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from oasr_backend.decoders.base import Search, SearchKind, SearchSettings
from oasr_backend.decoders.transducer.greedy import TransducerGreedySearch
from oasr_backend.decoders.transducer.network import TransducerNetwork
from oasr_backend.errors import ConfigError


def transducer_searches(network: TransducerNetwork) -> Mapping[str, SearchKind]:
    """By name; the first is what a stream gets that names none."""

    def greedy(settings: SearchSettings) -> Search:
        if settings.scorers:
            raise ConfigError(
                "transducer_greedy weighs no alternatives; leave the scorers out, or use a search "
                "that has a beam"
            )
        return TransducerGreedySearch(network.blank_id)

    kinds = (SearchKind("transducer_greedy", greedy, head="transducer_greedy"),)
    return MappingProxyType({kind.name: kind for kind in kinds})
