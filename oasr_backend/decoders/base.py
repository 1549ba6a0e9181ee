"""What a search must provide, and the searches that a CTC head comes with.

This is all that a search from outside the package needs: it implements `Search`, is described by a
`SearchKind`, and joins through the mapping of searches that a checkpoint gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from oasr_backend.decoders.arrays import IntArray
from oasr_backend.decoders.chunk import ChunkRows, Finish, Tail
from oasr_backend.decoders.greedy import GreedySearch
from oasr_backend.decoders.prefix_beam.search import PrefixBeamSearch
from oasr_backend.decoders.readback import begin_copy
from oasr_backend.decoders.settings import SearchSettings
from oasr_backend.errors import ConfigError, check_whole
from oasr_backend.options import MAX_BEAM_SIZE
from oasr_backend.types import Hypothesis

__all__ = [
    "CTC_SEARCHES",
    "ChunkRows",
    "Finish",
    "IntArray",
    "Search",
    "SearchKind",
    "SearchSettings",
    "Tail",
    "begin_copy",
]


#: What streams may ask of a search that honours it.
_OPTIONS = ("beam_size", "nbest", "hotwords", "use_lm", "rescoring")


class Search(Protocol):
    """Decodes many streams at once. Its storage is addressed by row, and a row is a stream's slot.

    Rows that were not reset since `grow` or since their last stream must not be decoded or read.
    """

    def grow(self, num_rows: int) -> None:
        """Have room for `num_rows` rows; the values of present rows are kept."""

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Put the rows at the start of a stream, and let go of what they held."""

    def begin(self, frames_NTX: torch.Tensor, chunk: ChunkRows) -> Finish:
        """Queue the decoding of one chunk of N rows, with at most one device-to-host copy.

        `frames_NTX` is the head's raw output. It has been read, as the device sees it, on return.
        """

    def num_stable(self, row: int) -> int:
        """How many first tokens of the row's hypotheses can no longer change."""

    def tail(self, row: int, skip: int) -> Tail:
        """What a transcript needs of the row, at the cost of its new tokens; host memory only."""

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        """The best hypotheses of a row, best first, without their first `skip` tokens.

        At least one, which has no tokens where nothing is heard, and at most `nbest`. Each token
        has its time and its log-prob. Reads host memory only.
        """


@dataclass(frozen=True)
class SearchKind:
    """A search by its name, the head whose output it reads, and what streams may ask of it.

    `honours` holds names of stream options among beam_size, nbest, hotwords, use_lm and rescoring.
    `beam_size` is that of streams that ask for 0, the search's own.
    `make` gets scorers for streams with hotwords or use_lm only, so where those are honoured.
    Raises ConfigError for an empty name, for another option in `honours`, and for a beam size that
    no stream could ask for.
    """

    name: str
    make: Callable[[SearchSettings], Search]
    head: str = "ctc"
    honours: frozenset[str] = frozenset()
    beam_size: int = 10

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a search has the name ''; give it one that streams can ask for")
        if unknown := sorted(set(self.honours) - set(_OPTIONS)):
            raise ConfigError(
                f"the search {self.name!r} honours {', '.join(map(repr, unknown))}, which is no "
                f"option of a search; name some of {', '.join(_OPTIONS)}, or none"
            )
        check_whole(f"the search {self.name!r}", least=1, beam_size=self.beam_size)
        if self.beam_size > MAX_BEAM_SIZE:
            raise ConfigError(
                f"the search {self.name!r}: beam_size={self.beam_size} is above {MAX_BEAM_SIZE}, "
                f"the most that a stream may ask for; give {MAX_BEAM_SIZE} or less"
            )

    def kept(self, beam_size: int) -> int:
        """How many hypotheses of a stream the search keeps, where it asks for `beam_size`."""
        return (beam_size or self.beam_size) if "beam_size" in self.honours else 1

    def most_told(self, beam_size: int) -> int:
        """How many of those a caller may ask for."""
        return self.kept(beam_size) if "nbest" in self.honours else 1


def _greedy(settings: SearchSettings) -> Search:
    if settings.scorers:
        raise ConfigError("greedy weighs no alternatives; scorers need decoder prefix_beam")
    return GreedySearch(settings.blank_id)


def _by_name(*kinds: SearchKind) -> Mapping[str, SearchKind]:
    return MappingProxyType({kind.name: kind for kind in kinds})


#: The one table of them. The first is what a stream gets that names none.
CTC_SEARCHES = _by_name(
    SearchKind("greedy", _greedy),
    SearchKind(
        "prefix_beam",
        PrefixBeamSearch,
        honours=frozenset({"beam_size", "nbest", "hotwords", "use_lm", "rescoring"}),
    ),
)
