"""Request parameters: typed, bounded, known by name, and only at START."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields

import pytest

from oasr_backend.config import KEYS, ServingConfig
from oasr_backend.decoders.base import CTC_SEARCHES
from oasr_backend.decoders.option_check import check_search
from oasr_backend.errors import ConfigError, InvalidRequestError
from oasr_backend.options import Asked, ParameterValue, StreamOptions, read_parameters
from tests.conftest import ROOT
from tests.engine_helpers import golden_engine


def test_nothing_given_is_mono_pcm_at_16_khz() -> None:
    assert StreamOptions.from_parameters({}) == StreamOptions(16000, "pcm", 1)


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 24000, 44100, 48000])
def test_usual_sample_rates_are_taken(rate: int) -> None:
    assert StreamOptions.from_parameters({"sample_rate": rate}).sample_rate == rate


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"sample_rate": 7999}, ["7999", "8000 .. 48000", "resample"]),
        ({"sample_rate": 96000}, ["96000", "8000 .. 48000"]),
        ({"sample_rate": "8000"}, ["sample_rate", "'8000'", "str", "int"]),
        ({"sample_rate": 8000.0}, ["sample_rate", "float", "int"]),
        ({"sample_rate": True}, ["sample_rate", "bool", "int"]),
        ({"encoding": "opus"}, ["'opus'", "pcm, mulaw, alaw"]),
        ({"encoding": 1}, ["encoding", "int", "str"]),
        ({"channels": 2}, ["channels=2", "mono", "mix"]),
        ({"channels": 0}, ["channels=0", "mono"]),
        ({"sampel_rate": 8000}, ["'sampel_rate'=8000", "did you mean 'sample_rate'"]),
        ({"hotword_boost": "much"}, ["hotword_boost", "str", "float"]),
        ({"hotword_boost": "nan"}, ["hotword_boost", "float"]),
        ({"endpoint": 1}, ["endpoint", "int", "bool"]),
        ({"nbest": 0}, ["nbest=0", "1 .. 64"]),
        ({"nbest": 65}, ["nbest=65", "1 .. 64"]),
        ({"decoder": 1}, ["decoder=1", "int", "str"]),
        ({"beam_size": -1}, ["beam_size=-1", "0 .. 64"]),
        ({"endpoint_max_s": -1}, ["endpoint_max_s=-1", "0 .. 3600"]),
        ({"chunkseq": 1}, ["'chunkseq'", "did you mean 'chunk_seq'"]),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_the_remedy(
    parameters: dict[str, ParameterValue], words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StreamOptions.from_parameters(parameters)
    for word in words:
        assert word in str(caught.value)


BEAM: dict[str, ParameterValue] = {"decoder": "prefix_beam"}


@pytest.mark.parametrize(
    ("hotwords", "words"),
    [
        ("A " * 3_000_000, ["hotwords='A A", "6000000 characters", "65536", "send"]),
        ("A" * 65_537, ["65537 characters", "65536"]),
        ("NEW YORK|" + "B" * 201, ["'BBB", "201 characters", "200", "line feeds or '|'"]),
    ],
)
def test_hotwords_too_long_are_refused_before_they_are_spelt(
    hotwords: str, words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StreamOptions.from_parameters({**BEAM, "hotwords": hotwords})
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 500


def test_hotwords_as_long_as_they_may_be_are_taken() -> None:
    phrases = tuple(f"{number:03} {'X' * 196}" for number in range(326))
    options = StreamOptions.from_parameters({**BEAM, "hotwords": "|".join(phrases) + "|" * 11})
    assert len(options.hotwords) == 65_536
    assert options.phrases == phrases


@pytest.mark.parametrize(
    "name", [*(f.name for f in fields(StreamOptions)), "chunk_seq", "a" * 10**6]
)
def test_no_message_holds_all_of_a_long_value(name: str) -> None:
    parameters: dict[str, ParameterValue] = {name: "long " * 200_000}
    # The model tells which searches there are, and which language.
    for is_first in (False,) if name in ("decoder", "language") else (True, False):
        with pytest.raises(InvalidRequestError) as caught:
            asked(parameters, is_first=is_first)
        assert "long long" in str(caught.value)
        assert len(str(caught.value)) < 1000


def asked(parameters: Mapping[str, ParameterValue], *, is_first: bool = True) -> Asked:
    return read_parameters(parameters, is_first=is_first, defaults=StreamOptions())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", 10**400])
@pytest.mark.parametrize("name", [f.name for f in fields(StreamOptions) if f.type == "float"])
def test_no_option_is_anything_but_a_finite_number(name: str, value: ParameterValue) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{name}=.*send"):
        StreamOptions.from_parameters({name: value})


def test_the_chunk_number_may_come_with_any_request() -> None:
    assert asked({"chunk_seq": 0}) == Asked(None, 0)
    assert asked({"chunk_seq": 0, "nbest": 2}) == Asked(StreamOptions(nbest=2), 0)
    assert asked({"chunk_seq": 5}, is_first=False) == Asked(None, 5)
    assert asked({}, is_first=False) == asked({}) == Asked(None, None)


@pytest.mark.parametrize("value", ["1", 1.0, True])
def test_a_chunk_number_is_an_integer(value: ParameterValue) -> None:
    for is_first in (True, False):
        with pytest.raises(InvalidRequestError, match="chunk_seq="):
            asked({"chunk_seq": value}, is_first=is_first)


def test_an_option_after_start_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"sample_rate=8000 came after START"):
        asked({"sample_rate": 8000, "chunk_seq": 2}, is_first=False)


@pytest.mark.parametrize("value", [2, "2", "2.0", 2.0])
def test_a_fraction_may_come_as_an_integer_or_a_string(value: ParameterValue) -> None:
    options = StreamOptions.from_parameters({"hotword_boost": value})
    assert options.hotword_boost == 2.0
    assert type(options.hotword_boost) is float


def test_phrases_are_split_at_lines_and_bars_and_each_counts_once() -> None:
    options = StreamOptions(decoder="prefix_beam", hotwords=" NEW  YORK|BOSTON\n\nNEW YORK |")
    assert options.phrases == ("NEW YORK", "BOSTON")


def test_a_server_without_settings_has_the_defaults_of_the_options() -> None:
    assert ServingConfig().defaults == StreamOptions()


def test_what_a_stream_says_wins_over_its_server() -> None:
    config = ServingConfig.of(decoder="prefix_beam", nbest=5, hotwords="A", word_times=True)
    defaults = config.defaults
    assert StreamOptions.from_parameters({}, defaults) == defaults
    assert StreamOptions.from_parameters({"nbest": 2}, defaults).nbest == 2
    greedy = StreamOptions.from_parameters({"decoder": "greedy"}, defaults)
    assert (greedy.nbest, greedy.hotwords, greedy.word_times) == (1, "", True)
    same = StreamOptions.from_parameters({"decoder": "prefix_beam", "beam_size": 7}, defaults)
    assert (same.nbest, same.hotwords, same.beam_size) == (5, "A", 7)


def test_a_server_has_a_beam_size_for_all_searches_or_leaves_it_to_each() -> None:
    beam: dict[str, ParameterValue] = {"decoder": "prefix_beam"}
    for stated in (0, 20):
        defaults = ServingConfig.of(beam_size=stated).defaults
        assert StreamOptions.from_parameters(beam, defaults).beam_size == stated
        assert StreamOptions.from_parameters({**beam, "beam_size": 0}, defaults).beam_size == 0
    check_search(CTC_SEARCHES, StreamOptions(decoder="prefix_beam", nbest=10))
    with pytest.raises(InvalidRequestError, match=r"nbest=11 is outside 1 \.\. 10"):
        check_search(CTC_SEARCHES, StreamOptions(decoder="prefix_beam", nbest=11))


def test_defaults_that_do_not_go_together_are_a_fault_of_the_server() -> None:
    with pytest.raises(ConfigError, match="defaults of the server's streams: nbest=5"):
        golden_engine(nbest=5)
    with pytest.raises(ConfigError, match="decoder='beam' is unknown; send one of greedy, prefix"):
        golden_engine(decoder="beam")


@pytest.mark.parametrize("hotwords", [" ", "|", "\n | \n"])
def test_hotwords_without_a_phrase_ask_for_nothing(hotwords: str) -> None:
    """A client may fill the field from a form that was left empty."""
    check_search(CTC_SEARCHES, StreamOptions(decoder="greedy", hotwords=hotwords))
    with pytest.raises(InvalidRequestError, match="hotwords='A' needs a search"):
        check_search(CTC_SEARCHES, StreamOptions(decoder="greedy", hotwords="A"))


def test_the_page_names_the_parameters_without_a_server_wide_default() -> None:
    page = (ROOT / "docs" / "result.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"Each has a server-wide default.*?, except (.*?)\.\n", page)
    own = [field.name for field in fields(StreamOptions) if field.name not in KEYS]
    assert re.findall(r"`(.*?)`", sentence) == own
