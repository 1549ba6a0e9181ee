"""The modified beam search of a transducer, beside one that takes paths one by one."""

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

from oasr_backend.decoders.base import SearchSettings
from oasr_backend.decoders.bias.base import PrefixScorer
from oasr_backend.decoders.bias.context_graph import ContextGraph
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.decoders.chunk import ChunkRows
from oasr_backend.decoders.rank import by_mean_score
from oasr_backend.decoders.transducer.beam.search import TransducerBeamSearch
from oasr_backend.types import Hypothesis
from tests.ngrams import arpa, scorer_of, write
from tests.reference.transducer_beam import PlainPath, PlainTransducerBeam, Tokens
from tests.rounding import UNIT64, gamma

DEVICE = torch.device("cpu")
GOLDEN = Path(__file__).parent / "golden" / "transducer_beam.npz"


class PlainNetwork(nn.Module):
    """Implements TransducerNetwork in float64, without a product of matrices.

    So a row's logits do not depend on how many there are, and no two are equal.
    """

    def __init__(self, seed: int, vocab: int, context: int, *, sharpness: float = 3.0) -> None:
        super().__init__()
        self.context_size, self.blank_id, self.blank_penalty = context, seed % 2, 0.0
        self.sharpness = sharpness
        generator = torch.Generator().manual_seed(seed)
        table_CVJ = torch.randn((context, vocab + 1, vocab), generator=generator)
        self.table_CVJ = table_CVJ.double()
        self.table_CVJ[:, 0] = 0.0

    @property
    def start_context(self) -> tuple[int, ...]:
        return (*(-1,) * (self.context_size - 1), self.blank_id)

    def predict(self, context_NC: Tensor) -> Tensor:
        return self.table_CVJ[torch.arange(self.context_size), context_NC + 1].sum(1)

    def logits(self, frames_NJ: Tensor, predicted_NJ: Tensor) -> Tensor:
        return torch.tanh(frames_NJ + predicted_NJ) * self.sharpness


def frames_of(seed: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).double()


def new_search(
    network: nn.Module, beam: int, num_rows: int = 1, *, scorers: Sequence[PrefixScorer] = ()
) -> TransducerBeamSearch:
    made = SearchSettings(device=DEVICE, beam_size=beam, token_candidates=4, scorers=tuple(scorers))
    search = TransducerBeamSearch(network, made)  # type: ignore[arg-type]
    search.grow(num_rows)
    search.reset_rows(range(num_rows))
    return search


def decode(
    search: TransducerBeamSearch,
    frames_NTJ: Tensor,
    start: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    num_frames: Sequence[int] | None = None,
) -> None:
    rows = range(len(frames_NTJ)) if rows is None else rows
    counts = [frames_NTJ.shape[1]] * len(frames_NTJ) if num_frames is None else num_frames
    search.begin(frames_NTJ, ChunkRows(np.array(rows), np.array(counts), np.array(start)))()


def decoded(
    network: nn.Module, frames_TJ: Tensor, beam: int, cuts: Sequence[int] = ()
) -> list[Hypothesis]:
    search, heard = new_search(network, beam), 0
    for piece_TJ in torch.tensor_split(frames_TJ, sorted(cuts)):
        if len(piece_TJ):
            decode(search, piece_TJ[None], [heard])
        heard += len(piece_TJ)
    return search.hypotheses(0, beam)


def plain(
    network: nn.Module, frames_TJ: Tensor, beam: int, **options: object
) -> PlainTransducerBeam:
    search = PlainTransducerBeam(network, beam, **options)  # type: ignore[arg-type]
    for frame_J in frames_TJ:
        search.frame(frame_J)
    return search


def assert_equal(
    found: Sequence[Hypothesis], expected: Sequence[tuple[Tokens, PlainPath]], num_frames: int
) -> None:
    assert [one.tokens for one in found] == [tokens for tokens, _ in expected]
    for one, (_, path) in zip(found, expected, strict=True):
        bound = 2 * gamma(20 * num_frames + 20, UNIT64) * (abs(path.score) + 10 * num_frames + 1)
        assert abs(one.score - path.score) <= bound
        assert one.times == path.times
        assert one.token_log_probs == pytest.approx(path.log_probs, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sharpness=st.sampled_from([0.3, 2.0, 6.0]),
    vocab=st.integers(3, 40),
    context=st.integers(1, 3),
    beam=st.integers(1, 6),
    num_frames=st.integers(0, 24),
    cuts=st.lists(st.integers(0, 24), max_size=5),
)
def test_any_cut_of_any_frames_equals_the_reference(
    seed: int,
    sharpness: float,
    vocab: int,
    context: int,
    beam: int,
    num_frames: int,
    cuts: list[int],
) -> None:
    network = PlainNetwork(seed, vocab, context, sharpness=sharpness)
    frames_TJ = frames_of(seed + 1, (num_frames, vocab))
    found = decoded(network, frames_TJ, beam, [min(cut, num_frames) for cut in cuts])
    assert_equal(found, plain(network, frames_TJ, beam).nbest(), num_frames)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 7), seed=st.integers(0, 2**31))
def test_rows_at_any_phase_equal_streams_alone(
    data: st.DataObject, num_rows: int, seed: int
) -> None:
    """Some rows of each chunk, in any order and with any number of frames; rows are used again."""
    network, beam = PlainNetwork(seed, 7, 2), data.draw(st.integers(1, 6))
    search = new_search(network, beam, num_rows)
    heard: list[list[Tensor]] = [[] for _ in range(num_rows)]
    for turn in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, unique=True))
        counts = [data.draw(st.integers(0, 4)) for _ in rows]
        frames_NTJ = frames_of(seed + turn, (len(rows), 4, 7))
        start = [len(heard[row]) for row in rows]
        if any(counts):
            decode(search, frames_NTJ[:, : max(counts)], start, rows=rows, num_frames=counts)
        for row, frames_TJ, count in zip(rows, frames_NTJ, counts, strict=True):
            heard[row].extend(frames_TJ[:count])
        if data.draw(st.booleans()):
            search.reset_rows(rows[:1])
            heard[rows[0]] = []
    for row, frames in enumerate(heard):
        expected = plain(network, frames, beam).nbest()  # type: ignore[arg-type]
        assert_equal(search.hypotheses(row, beam), expected, len(frames))
        (best,) = search.hypotheses(row, 1)
        assert search.tail(row, 0).tokens == best.tokens


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
