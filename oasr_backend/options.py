"""Request parameters: per-stream options at START, and the chunk number that any request may carry.

Everything is checked before anything is allocated. The server's defaults are ServingConfig's fields
of the same names.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from oasr_backend.config import ServingConfig
from oasr_backend.errors import ConfigError, InvalidRequestError, shown
from oasr_backend.types import ParameterValue

MIN_SAMPLE_RATE = 8000
MAX_SAMPLE_RATE = 48000
MAX_BEAM_SIZE = 64
MAX_PHRASES = 1000
#: Characters of one phrase, and of all hotwords: a thousand phrases of some words each.
MAX_PHRASE_LENGTH = 200
MAX_HOTWORDS_LENGTH = 1 << 16
# Characters that are read of an unknown name; no known one has more.
_MAX_NAME_LENGTH = 100
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
    decoder: str = "greedy"
    # Prefixes that the prefix beam keeps.
    beam_size: int = 10
    # Hypotheses in RESULT.
    nbest: int = 1
    # Tokens and words with times and confidence in RESULT.
    word_times: bool = False
    # What answers before the last one hold: nothing, tokens that cannot change, the best so far.
    partials: str = "every"
    # Phrases to favour, separated by line feeds or "|"; prefix beam only.
    hotwords: str = ""
    # Log-prob that each unit of a favoured phrase gains.
    hotword_boost: float = 1.0
    # Whether the server's n-gram model takes part; prefix beam only.
    use_lm: bool = False
    # Whether the attention decoder chooses among the hypotheses at the end; prefix beam only.
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
    def from_config(cls, config: ServingConfig) -> StreamOptions:
        """The server's defaults. Raises ConfigError where they do not go together."""
        names = {field.name for field in fields(config)} - {"language"}
        values = {f.name: getattr(config, f.name) for f in fields(cls) if f.name in names}
        try:
            return cls(**values)
        except InvalidRequestError as error:
            raise ConfigError(f"the defaults of the server's streams: {error}") from error

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, ParameterValue], defaults: StreamOptions | None = None
    ) -> StreamOptions:
        """Raises InvalidRequestError naming an unknown or ill-typed parameter."""
        if not parameters:
            return defaults or cls()
        kinds = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in parameters.items():
            if name == CHUNK_SEQ:
                continue
            if name not in kinds:
                raise InvalidRequestError(_unknown(name, value, kinds))
            values[name] = _typed(name, value, kinds[name])
        if values.get("decoder") == "greedy":
            # Defaults that only the server's own choice of decoder can honour.
            values = {"nbest": 1, "hotwords": "", "use_lm": False, "rescoring": False, **values}
        return replace(defaults or cls(), **values)

    @property
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
    _check_range("beam_size", options.beam_size, 1, MAX_BEAM_SIZE)
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


def chunk_seq(parameters: Mapping[str, ParameterValue]) -> int | None:
    """The request's number, or None. Raises InvalidRequestError for anything but an integer."""
    value = parameters.get(CHUNK_SEQ)
    if value is None or type(value) is int:
        return value
    raise InvalidRequestError(
        f"request parameter {CHUNK_SEQ}={shown(value)} is of type {type(value).__name__}; send it "
        "as int"
    )


def check_later_parameters(parameters: Mapping[str, ParameterValue]) -> None:
    """Options belong to START; a change in mid-stream would be heard by nobody."""
    if not parameters:
        return
    late = sorted(set(parameters) - {CHUNK_SEQ})
    if late:
        raise InvalidRequestError(
            f"request parameter {late[0][:_MAX_NAME_LENGTH]}={shown(parameters[late[0]])} came "
            "after START; send it with the first request of the sequence"
        )


def _unknown(name: str, value: ParameterValue, known: Mapping[str, str]) -> str:
    names = [*known, CHUNK_SEQ]
    nearest = difflib.get_close_matches(name[:_MAX_NAME_LENGTH], names, n=1, cutoff=0.0)[0]
    return (
        f"unknown request parameter {shown(name)}={shown(value)}; did you mean {nearest!r}? "
        f"Known: {', '.join(names)}"
    )
