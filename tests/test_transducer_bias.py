"""What favours some paths of a transducer's beam over others, by its definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from oasr_backend.decoders.bias.context_graph import ContextGraph
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.decoders.rank import by_mean_score
from oasr_backend.decoders.transducer.kinds import transducer_searches
from oasr_backend.options import StreamOptions
from oasr_backend.types import Hypothesis
from tests.decoder_groups import SYMBOLS, VOCAB, new_group
from tests.ngrams import DEVICE, arpa, scorer_of, write
from tests.reference.transducer_beam import PlainPath, Tokens
from tests.transducer_beams import (
    PlainNetwork,
    decode,
    frames_of,
    new_search,
    plain,
)


def with_bonus(
    network: nn.Module, frames_TJ: Tensor, bonus: Callable[..., float]
) -> list[tuple[Tokens, PlainPath]]:
    """`bonus` takes tokens and whether they are all."""
    search = plain(network, frames_TJ, 3, width=4, bonus=lambda p: bonus(p, is_final=False))
    return search.nbest(lambda p: bonus(p, is_final=True))


def assert_same_order(
    found: Sequence[Hypothesis], expected: Sequence[tuple[Tokens, PlainPath]]
) -> None:
    assert [one.tokens for one in found] == [tokens for tokens, _ in expected]
    assert [one.score for one in found] == pytest.approx([path.score for _, path in expected])
    assert [one.times for one in found] == [path.times for _, path in expected]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lists=st.lists(
        st.lists(st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple), min_size=1),
        min_size=1,
        max_size=3,
    ),
    cut=st.integers(0, 12),
)
def test_hotwords_lift_paths_as_their_definition_says(
    seed: int, lists: list[list[Tokens]], cut: int
) -> None:
    starts_word = [unit % 2 == 1 for unit in range(7)]
    network, scorer = PlainNetwork(seed, 7, 2), HotwordScorer(starts_word, DEVICE)
    for row, phrases in enumerate(lists):
        graph = ContextGraph.build(phrases, 0.9, vocab_size=7)
        scorer.assign([row], tuple(phrases), graph)
    frames_NTJ = frames_of(seed + 1, (len(lists), 12, 7))
    search, heard = new_search(network, 3, len(lists), scorers=[scorer]), 0
    for piece_NTJ in torch.tensor_split(frames_NTJ, [cut], dim=1):
        if piece_NTJ.shape[1]:
            decode(search, piece_NTJ, [heard] * len(lists))
        heard += piece_NTJ.shape[1]

    for row, phrases in enumerate(lists):
        graph = ContextGraph.build(phrases, 0.9, vocab_size=7)

        def bonus(tokens: Tokens, *, is_final: bool, graph: ContextGraph = graph) -> float:
            state, found = 0, 0.0
            for unit in tokens:
                found += graph.earned_S[state] * starts_word[unit] - graph.held_S[state]
                state = int(graph.next_SK[state, graph.class_V[unit]])
                found += graph.held_S[state]
            end = graph.earned_S[state] - graph.held_S[state]
            return float(found + end * is_final)

        expected = with_bonus(network, frames_NTJ[row], bonus)
        assert_same_order(search.hypotheses(row, 3), expected)


ENTRIES = {
    ("<unk>",): (-2.0, 0.0),
    ("<s>",): (-9.0, -0.3),
    ("</s>",): (-1.0, 0.0),
    ("\u2581A",): (-0.5, -0.4),
    ("B",): (-0.9, -0.1),
    ("\u2581A", "B"): (-0.2, 0.0),
    ("<s>", "B"): (-0.1, 0.0),
    ("B", "</s>"): (-0.05, 0.0),
}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), cut=st.integers(0, 12))
def test_an_ngram_model_weighs_paths_and_their_ends(
    tmp_path_factory: pytest.TempPathFactory, seed: int, cut: int
) -> None:
    scorer = scorer_of(
        write(tmp_path_factory.mktemp("lm"), arpa(ENTRIES)), weight=0.7, unit_bonus=0.4
    )
    network, rank = PlainNetwork(seed - seed % 2, 5, 2), by_mean_score(2)
    frames_NTJ = frames_of(seed + 1, (2, 12, 5))
    search, heard = new_search(network, 3, 2, scorers=[scorer]), 0
    for piece_NTJ in torch.tensor_split(frames_NTJ, [cut], dim=1):
        if piece_NTJ.shape[1]:
            decode(search, piece_NTJ, [heard] * 2)
        heard += piece_NTJ.shape[1]
    names = {0: "<unk>", 1: "\u2581A", 2: "B", 3: "<unk>", 4: "<unk>"}

    def log10(history: str, word: str) -> float:
        if (history, word) in ENTRIES:
            return ENTRIES[history, word][0]
        return ENTRIES[(history,)][1] + ENTRIES[(word,)][0]

    def bonus(tokens: Tokens, *, is_final: bool) -> float:
        words = ["<s>", *(names[unit] for unit in tokens)]
        total = sum(log10(a, b) for a, b in itertools.pairwise(words))
        return float(0.7 * np.log(10) * total + 0.4 * len(tokens))

    nbests = [search.hypotheses(row, 3) for row in range(2)]
    for row, ended in enumerate(scorer.ended(nbests, [rank, rank])):
        assert_same_order(nbests[row], with_bonus(network, frames_NTJ[row], bonus))
        assert {one.tokens for one in ended} == {one.tokens for one in nbests[row]}
        assert [rank(one) for one in ended] == sorted(map(rank, ended), reverse=True)


def test_the_end_of_a_text_keeps_the_order_by_score_per_token(tmp_path: Path) -> None:
    """In a group of decoders: a longer hypothesis of a lower score stays before a shorter one."""
    entries = {("<unk>",): (-1.0, 0.0), ("</s>",): (-0.5, 0.0), ("<s>",): (-9.0, 0.0)}
    path = write(tmp_path, arpa(entries))
    scorer = scorer_of(path, weight=0.01, symbols=SYMBOLS, device=torch.device("cpu"))
    network = PlainNetwork(2, VOCAB, 1)
    group = new_group(searches=transducer_searches(network), language_model=scorer)
    options = StreamOptions(decoder="transducer_beam", nbest=4, use_lm=True)
    group.open(0, options)
    frames_NTJ = frames_of(3, (1, 6, VOCAB))
    heads = {"joiner": frames_NTJ.cpu(), "transducer_greedy": torch.zeros((1, 6, 2))}
    group.begin(np.array([0]), np.array([6]), heads, torch.zeros((1, 6, 1)))()
    before = group.nbest(0, 4)
    assert group.weighs_ends
    group.end([0])
    after = group.nbest(0, 4)
    rank = by_mean_score(1)
    assert [one.tokens for one in after] == [one.tokens for one in before]
    assert [rank(one) for one in after] == sorted(map(rank, after), reverse=True)
    assert [one.score for one in after] != sorted((one.score for one in after), reverse=True)
    assert all(a.score < b.score for a, b in zip(after, before, strict=True))
    group.check_integrity([0])
    group.close(0)
