"""Request parameters: per-stream options at START, and the chunk number that any request may carry.

Types and ranges are checked here, before anything is allocated. Which search honours which option
is checked where the searches are. The server's defaults are keys of config.pbtxt of the same names.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from oasr_backend.errors import InvalidRequestError, shown

MIN_SAMPLE_RATE = 8000
MAX_SAMPLE_RATE = 48000
MAX_BEAM_SIZE = 64
MAX_PHRASES = 1000
#: Characters of one phrase, and of all hotwords: a thousand phrases of some words each.
MAX_PHRASE_LENGTH = 200
MAX_HOTWORDS_LENGTH = 1 << 16
#: Options that a search may be unable to honour, so that they do not go over to another search.
_OF_THE_SEARCH = ("nbest", "hotwords", "use_lm", "rescoring")
# Characters that are read of an unknown name; no known one has more.
_MAX_NAME_LENGTH = 100
#: A request parameter as Triton hands it over.
ParameterValue = bool | int | float | str

ENCODINGS = ("pcm", "mulaw", "alaw")
PARTIALS = ("off", "stable", "every")
#: Numbers the requests of a stream, so that a lost or repeated one is noticed.
CHUNK_SEQ = "chunk_seq"


@dataclass(frozen=True)
class StreamOptions:
    """Field names are the request parameters' names."""

    # Rate of the samples that the client sends, in Hz.
    sample_rate: int = 16000
    # mulaw, alaw: PCM16 holds one G.711 code (0..255) an element.
    encoding: str = "pcm"
    # Mono only: interleaved channels cannot be told from mono samples.
    channels: int = 1
    # Must be the model's own; empty: whatever it is.
    language: str = ""
    # Name of a search; empty: the first that the checkpoint offers.
    decoder: str = ""
    # Hypotheses that a beam search keeps; 0: as many as the search has by itself.
    beam_size: int = 0
    # Hypotheses in RESULT.
    nbest: int = 1
    # Tokens and words with times and confidence in RESULT.
    word_times: bool = False
    # What answers before the last one hold: nothing, tokens that cannot change, the best so far.
    partials: str = "every"
    # Phrases to favour, separated by line feeds or "|".
    hotwords: str = ""
    # Log-prob that each unit of a favoured phrase gains.
    hotword_boost: float = 1.0
    # Whether the server's n-gram model takes part.
    use_lm: bool = False
    # Whether the attention decoder chooses among the hypotheses at the end.
    rescoring: bool = False
    # Whether RESULT splits the stream into segments.
    endpoint: bool = False
    # Silence after speech that ends a segment.
    endpoint_silence_s: float = 0.8
    # Silence before any speech that ends an empty segment; 0: never.
    endpoint_silence_start_s: float = 5.0
    # Length after which a segment ends at the next word; 0: never.
    endpoint_max_s: float = 30.0

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, ParameterValue], defaults: StreamOptions | None = None
    ) -> StreamOptions:
        """The options of a START. Raises InvalidRequestError naming the parameter at fault."""
        defaults = defaults or cls()
        kinds = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in parameters.items():
            if name == CHUNK_SEQ:
                continue
            if name not in kinds:
                raise InvalidRequestError(_unknown(name, value, kinds))
            values[name] = _typed(name, value, kinds[name])
        if values.get("decoder", defaults.decoder) != defaults.decoder:
            # The server's defaults for these suit the server's own choice of search.
            plain = {one.name: one.default for one in fields(cls) if one.name in _OF_THE_SEARCH}
            values = {**plain, **values}
        return replace(defaults, **values)

    @cached_property
    def phrases(self) -> tuple[str, ...]:
        """The hotwords one by one."""
        parts = self.hotwords.replace("|", "\n").split("\n")
        return tuple(dict.fromkeys(" ".join(part.split()) for part in parts if part.strip()))

    def __post_init__(self) -> None:
        _check_audio(self)
        _check_search(self)
        _check_endpoint(self)


def _check_audio(options: StreamOptions) -> None:
    if not MIN_SAMPLE_RATE <= options.sample_rate <= MAX_SAMPLE_RATE:
        raise InvalidRequestError(
            f"sample_rate={options.sample_rate} Hz is outside {MIN_SAMPLE_RATE} .. "
            f"{MAX_SAMPLE_RATE}; resample the audio or give its true rate"
        )
    _check_choice("encoding", options.encoding, ENCODINGS)
    if options.channels != 1:
        raise InvalidRequestError(
            f"channels={options.channels}: one stream is one mono signal; mix the channels down, "
            "or open one stream for each"
        )


def _check_search(options: StreamOptions) -> None:
    _check_choice("partials", options.partials, PARTIALS)
    _check_range("beam_size", options.beam_size, 0, MAX_BEAM_SIZE)
    _check_range("nbest", options.nbest, 1, MAX_BEAM_SIZE)
    _check_range("hotword_boost", options.hotword_boost, 0.0, 20.0)
    _check_hotwords(options)


def _check_hotwords(options: StreamOptions) -> None:
    """Before anything is spelt: other streams would wait for it."""
    if len(options.hotwords) > MAX_HOTWORDS_LENGTH:
        raise InvalidRequestError(
            f"hotwords={shown(options.hotwords)} holds {len(options.hotwords)} characters, more "
            f"than {MAX_HOTWORDS_LENGTH}; send the phrases that this stream is likely to hear"
        )
    phrases = options.phrases
    if len(phrases) > MAX_PHRASES:
        raise InvalidRequestError(
            f"hotwords holds {len(phrases)} phrases, more than {MAX_PHRASES}; send those that "
            "this stream is likely to hear"
        )
    longest = max(phrases, key=len, default="")
    if len(longest) > MAX_PHRASE_LENGTH:
        raise InvalidRequestError(
            f"hotwords: the phrase {shown(longest)} holds {len(longest)} characters, more than "
            f"{MAX_PHRASE_LENGTH}; part phrases by line feeds or '|', and send only names and terms"
        )


def _check_endpoint(options: StreamOptions) -> None:
    _check_range("endpoint_silence_s", options.endpoint_silence_s, 0.1, 60.0)
    _check_range("endpoint_silence_start_s", options.endpoint_silence_start_s, 0.0, 3600.0)
    _check_range("endpoint_max_s", options.endpoint_max_s, 0.0, 3600.0)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidRequestError(
            f"{name}={shown(value)} is unknown; send one of {', '.join(choices)}"
        )


def _check_range(name: str, value: float, least: float, most: float) -> None:
    # Not a number fails too.
    if not least <= value <= most:
        raise InvalidRequestError(
            f"{name}={value:g} is outside {least:g} .. {most:g}; send a value in that range"
        )


def _typed(name: str, value: ParameterValue, kind: str) -> ParameterValue:
    """Not every client can send a fraction: where one is due, integers and strings do too."""
    if type(value).__name__ == kind:
        return value
    if kind == "float" and type(value) in (int, str):
        try:
            number = float(value)
        except (OverflowError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise InvalidRequestError(
        f"request parameter {name}={shown(value)} is of type {type(value).__name__}; send it as "
        f"{kind}"
    )


class Asked(NamedTuple):
    """What the parameters of one request say. `options` None: the server's defaults."""

    options: StreamOptions | None = None
    chunk_seq: int | None = None


def read_parameters(
    parameters: Mapping[str, ParameterValue], *, is_first: bool, defaults: StreamOptions
) -> Asked:
    """Raises InvalidRequestError for a bad parameter, and for an option after START."""
    if not parameters:
        return NOTHING_ASKED
    number = _chunk_seq(parameters)
    if parameters.keys() <= {CHUNK_SEQ}:
        return Asked(chunk_seq=number)
    if not is_first:
        raise _late(parameters)
    return Asked(StreamOptions.from_parameters(parameters, defaults), number)


NOTHING_ASKED = Asked()


def _chunk_seq(parameters: Mapping[str, ParameterValue]) -> int | None:
    value = parameters.get(CHUNK_SEQ)
    if value is None or type(value) is int:
        return value
    raise InvalidRequestError(
        f"request parameter {CHUNK_SEQ}={shown(value)} is of type {type(value).__name__}; send it "
        "as int"
    )


def _late(parameters: Mapping[str, ParameterValue]) -> InvalidRequestError:
    """Options belong to START: a change in mid-stream would go unheard."""
    name = min(set(parameters) - {CHUNK_SEQ})
    return InvalidRequestError(
        f"request parameter {name[:_MAX_NAME_LENGTH]}={shown(parameters[name])} came after START; "
        "send it with the first request of the sequence"
    )


def _unknown(name: str, value: ParameterValue, known: Mapping[str, str]) -> str:
    names = [*known, CHUNK_SEQ]
    nearest = difflib.get_close_matches(name[:_MAX_NAME_LENGTH], names, n=1, cutoff=0.0)[0]
    return (
        f"unknown request parameter {shown(name)}={shown(value)}; did you mean {nearest!r}? "
        f"Known: {', '.join(names)}"
    )
