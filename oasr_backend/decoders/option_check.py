"""Which options of a stream a search, the model and the server can honour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oasr_backend.decoders.base import CTC_SEARCHES, SearchKind
from oasr_backend.decoders.bias.spelling import HotwordSpelling
from oasr_backend.decoders.transducer.kinds import TRANSDUCER_HEADS
from oasr_backend.errors import InvalidRequestError, shown
from oasr_backend.options import StreamOptions

#: Options that only some searches honour, beside nbest.
_OF_A_SEARCH = ("hotwords", "use_lm", "rescoring")
#: The searches of this backend: what a checkpoint needs for them, and the heads that they read.
_FAMILIES = (
    ("a CTC head", {name: kind.head for name, kind in CTC_SEARCHES.items()}),
    ("a transducer", TRANSDUCER_HEADS),
)


class OptionCheck:
    def __init__(
        self,
        searches: Mapping[str, SearchKind],
        spelling: HotwordSpelling | None,
        *,
        has_lm: bool,
        no_rescoring: str,
    ) -> None:
        """`no_rescoring` says why nothing can be rescored; empty where it can.

        `spelling` None: the units are not known, so that no phrase is spelt.
        """
        self._searches = searches
        self._spelling = spelling
        self._has_lm = has_lm
        self._no_rescoring = no_rescoring

    def resolve(self, options: StreamOptions) -> StreamOptions:
        """With the name of the first search, where the stream names none."""
        return resolve_search(self._searches, options)

    def check(self, options: StreamOptions) -> None:
        """Raises InvalidRequestError naming the option, its value and what to send instead."""
        options = self.resolve(options)
        check_search(self._searches, options)
        if options.use_lm and not self._has_lm:
            raise InvalidRequestError(
                "use_lm: this server has no n-gram model; leave it out, or have lm_path set"
            )
        if options.rescoring and self._no_rescoring:
            raise InvalidRequestError(
                f"rescoring: {self._no_rescoring}; leave rescoring out, or serve a checkpoint "
                "whose attention decoder can be used"
            )
        if options.phrases and self._spelling is not None:
            self._spelling.graph(options)


def check_search(searches: Mapping[str, SearchKind], options: StreamOptions) -> None:
    """Raises InvalidRequestError for a search that is none of these, or an option it ignores."""
    if options.decoder not in searches:
        raise InvalidRequestError(
            f"decoder={shown(options.decoder)} {_why_not_offered(searches, options.decoder)}; "
            f"send one of {', '.join(searches)}"
        )
    search = searches[options.decoder]
    most = search.most_told(options.beam_size)
    if not 1 <= options.nbest <= most:
        raise InvalidRequestError(
            f"nbest={options.nbest} is outside 1 .. {most}, which {search.name} can keep; "
            f"lower nbest{_or_send(searches, 'nbest', 'and a beam_size')}"
        )
    for name in _OF_A_SEARCH:
        # Separators alone hold no phrase, so that they ask for nothing.
        is_asked = options.phrases if name == "hotwords" else getattr(options, name)
        if is_asked and name not in search.honours:
            raise InvalidRequestError(
                f"{name}={shown(getattr(options, name))} needs a search that can honour it, which "
                f"{search.name} cannot; leave {name} out"
                f"{_or_send(searches, name, 'too')}"
            )


def _why_not_offered(searches: Mapping[str, SearchKind], name: str) -> str:
    heads = {search.head for search in searches.values()}
    for needed, head_of in _FAMILIES:
        if name in head_of:
            if heads.isdisjoint(head_of.values()):
                return f"needs {needed}, and this checkpoint is served without one"
            return "is a search that this checkpoint does not offer"
    return "is unknown"


def resolve_search(searches: Mapping[str, SearchKind], options: StreamOptions) -> StreamOptions:
    """With the name of the first search, where the stream names none."""
    return options if options.decoder else replace(options, decoder=next(iter(searches)))


def _or_send(searches: Mapping[str, SearchKind], option: str, more: str) -> str:
    """The other remedy, where there is one."""
    names = [name for name, kind in searches.items() if option in kind.honours]
    return f", or send decoder={' or '.join(names)} {more}" if names else ""
