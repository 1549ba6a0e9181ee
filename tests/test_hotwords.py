"""Favoured phrases: the automaton, the search that walks it, and the streams beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder
from oasr_backend.decoders.bias import context_graph as graphs
from oasr_backend.decoders.bias.context_graph import ContextGraph
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.errors import ConfigError, InvalidRequestError
from oasr_backend.streaming.engine import Engine
from tests.engine_helpers import (
    ask,
    ask_one,
    assert_all_is_free,
    chunk,
    error_of,
    golden_engine,
    noise,
    text_alone,
)
from tests.reference.ctc import PrefixBeam, log_add
from tests.same_results import assert_same_results

VOCAB = 7
#: Units 1, 3 and 5 start a word.
STARTS_WORD = [unit % 2 == 1 for unit in range(VOCAB)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Phrases = list[tuple[int, ...]]
BEAM = {"decoder": "prefix_beam"}


def plain_bonus(text: Sequence[int], phrases: Phrases, boost: float, *, is_final: bool) -> float:
    """By definition: confirmed phrases, and the longest beginning that the text ends with."""
    text, units = tuple(text), 0
    for phrase in set(phrases):
        for end in range(len(phrase), len(text) + 1):
            if text[end - len(phrase) : end] != phrase:
                continue
            is_confirmed = is_final if end == len(text) else STARTS_WORD[text[end]]
            units += len(phrase) * is_confirmed
    if not is_final:
        lengths = range(1, len(text) + 1)
        begins = [n for n in lengths if any(p[:n] == text[-n:] for p in phrases)]
        units += max(begins, default=0)
    return boost * units


def walked_bonus(graph: ContextGraph, text: Sequence[int], *, is_final: bool) -> float:
    scorer = HotwordScorer(STARTS_WORD, DEVICE)
    scorer.assign([0], "key", graph)
    state_NB, bonus = torch.zeros((1, 1), dtype=torch.int64, device=DEVICE), 0.0
    for unit in text:
        walk = scorer.for_chunk(np.zeros(1, np.int64))
        looked = walk.look_up(torch.tensor([[[-1, unit]]], device=DEVICE))
        gain_NBC, next_NBC = walk.extend(looked, state_NB)
        bonus, state_NB = bonus + float(gain_NBC[0, 0, 1]), next_NBC[..., 1]
    return bonus + (float(walk.settle(state_NB)) if text and is_final else 0.0)


phrase_lists = st.lists(
    st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5
)


@given(phrases=phrase_lists, text=st.lists(st.integers(1, VOCAB - 1), max_size=14))
def test_walking_the_graph_adds_up_to_the_definition(phrases: Phrases, text: list[int]) -> None:
    graph = ContextGraph.build(phrases, 0.7, vocab_size=VOCAB)
    for is_final in (False, True):
        expected = plain_bonus(text, phrases, 0.7, is_final=is_final)
        assert walked_bonus(graph, text, is_final=is_final) == pytest.approx(expected)


def test_a_phrase_gains_nothing_inside_a_longer_word() -> None:
    graph = ContextGraph.build([(1, 2)], 1.0, vocab_size=VOCAB)
    assert walked_bonus(graph, [1, 2, 4, 3], is_final=True) == 0.0
    assert walked_bonus(graph, [1, 2, 3, 4], is_final=True) == 2.0
    assert walked_bonus(graph, [1], is_final=True) == 0.0


@pytest.mark.numerics
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    lists=st.lists(phrase_lists, min_size=1, max_size=4),
    boost=st.sampled_from([0.0, 0.7, 3.0]),
    cuts=st.lists(st.integers(0, 20), max_size=3),
)
def test_a_batch_of_streams_with_their_own_phrases_equals_the_plain_search(
    seed: int, lists: list[Phrases], boost: float, cuts: list[int]
) -> None:
    scorer = HotwordScorer(STARTS_WORD, DEVICE)
    config = GpuDecoderConfig(beam_size=5, token_candidates=5)
    decoder = GpuStreamingDecoder(config, DEVICE, scorers=[scorer])
    states = [decoder.create_state(1, VOCAB) for _ in lists]
    for state, phrases in zip(states, lists, strict=True):
        graph = ContextGraph.build(phrases, boost, vocab_size=VOCAB)
        scorer.assign(state.rows, tuple(phrases), graph)
    generator = torch.Generator().manual_seed(seed)
    log_probs_NTV = torch.randn((len(lists), 20, VOCAB), generator=generator) * 2.0
    log_probs_NTV = log_probs_NTV.log_softmax(-1)
    for chunk_NTV in torch.tensor_split(log_probs_NTV, sorted(cuts), dim=1):
        decoder.decode_chunk_batch(chunk_NTV.to(DEVICE), states)
    scorer.check_integrity()
    for state, phrases, log_probs_TV in zip(states, lists, log_probs_NTV, strict=True):
        expected = searched(log_probs_TV, phrases, boost)
        found = decoder.nbest(state, 5)
        assert [one.score for one in found] == pytest.approx([score for _, score in expected])
        assert found[0].tokens == expected[0][0]


def searched(
    log_probs_TV: torch.Tensor, phrases: Phrases, boost: float
) -> list[tuple[tuple[int, ...], float]]:
    search = PrefixBeam(5, 5, bonus=lambda p: plain_bonus(p, phrases, boost, is_final=False))
    for log_probs_V in log_probs_TV.double().numpy():
        search.frame(log_probs_V)
    scored = [
        (prefix, log_add(*pair) + plain_bonus(prefix, phrases, boost, is_final=True))
        for prefix, pair in search.prefixes.items()
    ]
    return sorted(scored, key=lambda item: -item[1])


def test_graphs_that_no_stream_uses_any_more_are_dropped() -> None:
    scorer = HotwordScorer(STARTS_WORD, DEVICE)
    for number in range(50):
        graph = ContextGraph.build([(1, 2)], float(number), vocab_size=VOCAB)
        scorer.assign([number % 3], number, graph)
        scorer.check_integrity()
        scorer.release([number % 3])
    assert scorer.num_graphs == 0
    assert len(scorer._graphs) == 1


def test_a_row_follows_the_graph_that_it_was_given_last() -> None:
    """Also where the tables are at hand already, and where the row had another graph before."""
    scorer, rows = HotwordScorer(STARTS_WORD, DEVICE), [0, 3, 40]
    boosts = [1.0, 2.0, 4.0]
    for row, boost in zip(rows, boosts, strict=True):
        scorer.assign([row], boost, ContextGraph.build([(1, 2)], boost, vocab_size=VOCAB))
    id_NAC = torch.tensor([[[-1, 1]]], device=DEVICE).expand(3, 1, 2)
    state_NB = torch.zeros((3, 1), dtype=torch.int64, device=DEVICE)

    def gains() -> list[float]:
        walk = scorer.for_chunk(np.array(rows))
        gain_NBC, _ = walk.extend(walk.look_up(id_NAC), state_NB)
        found: list[float] = gain_NBC[:, 0, 1].tolist()
        return found

    assert gains() == boosts
    for row in rows[:2]:
        scorer.release([row])
    for row, boost in zip(rows[:2], [4.0, 1.0], strict=True):
        scorer.assign([row], boost, ContextGraph.build([(1, 2)], boost, vocab_size=VOCAB))
        scorer.check_integrity()
    assert gains() == [4.0, 1.0, 4.0]


def test_greedy_refuses_scorers() -> None:
    scorer = HotwordScorer(STARTS_WORD, DEVICE)
    with pytest.raises(ConfigError, match="prefix_beam"):
        GpuStreamingDecoder(GpuDecoderConfig(decoder="greedy"), scorers=[scorer])


def test_a_table_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_ENTRIES", 8)
    with pytest.raises(InvalidRequestError, match=r"9 entries, more than 8"):
        ContextGraph.build([(1, 2)], 1.0, vocab_size=VOCAB)


@pytest.mark.numerics
def test_neighbours_of_a_stream_with_hotwords_are_what_they_were() -> None:
    options: list[dict[str, Any]] = [{}, BEAM, {**BEAM, "nbest": 4}, BEAM]
    audio = [noise(seed, seconds=2 + seed / 4) for seed in range(4)]

    def run(*, with_hotwords: bool) -> list[Any]:
        engine = golden_engine()
        (phrase,) = spellable(engine, 1)
        boosted = {"hotwords": phrase, "hotword_boost": 5.0} if with_hotwords else {}
        everyone: list[dict[str, Any]] = [*options, {**BEAM, **boosted}]
        results = ask(engine, *(
            chunk(i, audio[i % 4], flags="SE", parameters=p, wants_result=True)
            for i, p in enumerate(everyone)
        ))  # fmt: skip
        assert_all_is_free(engine)
        assert all(result.error is None for result in results)
        return [result.document for result in results[:4]]

    assert_same_results(run(with_hotwords=True), run(with_hotwords=False))


def spellable(engine: Engine, count: int) -> list[str]:
    """Words that the model has a unit of its own for."""
    tokenizer = engine.parts.results._tokenizer
    units = [unit for unit in range(tokenizer.vocab_size) if tokenizer.starts_word(unit)]
    words = [tokenizer.decode([unit]) for unit in units]
    return [word for word in words if word][:count]


def test_a_phrase_that_the_units_cannot_spell_is_named_and_harms_no_stream() -> None:
    engine = golden_engine()
    ask_one(engine, "a", noise(1), flags="S")
    parameters = {**BEAM, "hotwords": f"{spellable(engine, 1)[0]}|\u2603"}
    result = ask_one(engine, "b", noise(1), flags="S", parameters=parameters)
    error_of(result, "hotwords", "'\u2603'", "cannot spell")
    assert ask_one(engine, "a", flags="E").text == text_alone(noise(1))
    assert_all_is_free(engine)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"hotwords": "a"}, ["hotwords='a'", "decoder=prefix_beam"]),
        ({**BEAM, "hotwords": "a", "hotword_boost": 21}, ["hotword_boost=21", "0 .. 20"]),
        ({**BEAM, "hotwords": "|".join(map(str, range(1001)))}, ["1001 phrases", "1000"]),
    ],
)
def test_hotwords_that_cannot_be_honoured_are_refused(
    parameters: dict[str, Any], words: list[str]
) -> None:
    error_of(ask_one(golden_engine(), "a", flags="S", parameters=parameters), *words)


def test_unspellable_defaults_of_a_server_fail_its_load() -> None:
    with pytest.raises(ConfigError, match="cannot spell"):
        golden_engine(decoder="prefix_beam", hotwords="\u2603")


def test_many_streams_with_phrases_come_and_go_and_leave_nothing() -> None:
    engine = golden_engine()
    phrases = spellable(engine, 6)
    for round_number in range(12):
        ask(engine, *(
            chunk(i, noise(i)[:14000], flags="SE",
                  parameters={**BEAM, "hotwords": phrases[(i + round_number) % 6]})
            for i in range(8)
        ))  # fmt: skip
    assert +engine.parts.metrics.finished == {"end": 96}
    assert_all_is_free(engine)
