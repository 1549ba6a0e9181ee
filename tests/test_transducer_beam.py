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
from torch.utils._python_dispatch import TorchDispatchMode

from oasr_backend.decoders.base import SearchSettings
from oasr_backend.decoders.bias.base import PrefixScorer
from oasr_backend.decoders.bias.context_graph import ContextGraph
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.decoders.chunk import ChunkRows
from oasr_backend.decoders.rank import by_mean_score
from oasr_backend.decoders.transducer.beam.frame import best_units
from oasr_backend.decoders.transducer.beam.search import TransducerBeamSearch
from oasr_backend.decoders.transducer.kinds import transducer_searches
from oasr_backend.errors import StreamStateError
from oasr_backend.models.transducer import Transducer, TransducerConfig
from oasr_backend.options import StreamOptions
from oasr_backend.types import Hypothesis
from tests.decoder_groups import CPU, SYMBOLS, VOCAB, new_group
from tests.ngrams import DEVICE, arpa, scorer_of, write
from tests.reference.transducer_beam import PlainPath, PlainTransducerBeam, Tokens
from tests.rounding import UNIT64, gamma

GOLDEN = Path(__file__).parent / "golden" / "zip_rnnt_small"
#: Of a frame, the network's own five among them.
MOST_OPERATORS = 32


class PlainNetwork(nn.Module):
    """Implements TransducerNetwork in float64, without a product of matrices.

    So a row's logits do not depend on how many there are, and no two are equal.
    """

    table_CVJ: Tensor

    def __init__(self, seed: int, vocab: int, context: int, *, sharpness: float = 3.0) -> None:
        super().__init__()
        self.context_size, self.blank_id, self.blank_penalty = context, seed % 2, 0.0
        self.sharpness = sharpness
        generator = torch.Generator().manual_seed(seed)
        table_CVJ = torch.randn((context, vocab + 1, vocab), generator=generator)
        table_CVJ[:, 0] = 0.0
        self.register_buffer("table_CVJ", table_CVJ.double())

    @property
    def start_context(self) -> tuple[int, ...]:
        return (*(-1,) * (self.context_size - 1), self.blank_id)

    def predict(self, context_NC: Tensor) -> Tensor:
        return sum(self.table_CVJ[c][context_NC[:, c] + 1] for c in range(self.context_size))

    def logits(self, frames_NJ: Tensor, predicted_NJ: Tensor) -> Tensor:
        return torch.tanh(frames_NJ + predicted_NJ) * self.sharpness


def frames_of(seed: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).double().to(DEVICE)


def new_search(
    network: nn.Module, beam: int, num_rows: int = 1, *, scorers: Sequence[PrefixScorer] = ()
) -> TransducerBeamSearch:
    made = SearchSettings(device=DEVICE, beam_size=beam, token_candidates=4, scorers=tuple(scorers))
    search = TransducerBeamSearch(network.to(DEVICE), made)  # type: ignore[arg-type]
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
    search = PlainTransducerBeam(network.to(DEVICE), beam, **options)  # type: ignore[arg-type]
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
        for frames_TJ, count in zip(frames_NTJ, counts, strict=True):
            frames_TJ[count:] = float("nan")
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


@pytest.fixture(scope="module", name="golden_network")
def _golden_network() -> Transducer:
    weights = torch.load(GOLDEN / "pretrained.pt", weights_only=True)["model"]
    joiner_dim, model_dim = weights["joiner.encoder_proj.weight"].shape
    vocab_size, embedding_dim = weights["decoder.embedding.weight"].shape
    network = Transducer(
        TransducerConfig(
            model_dim=model_dim,
            joiner_dim=joiner_dim,
            embedding_dim=embedding_dim,
            vocab_size=vocab_size,
            context_size=weights["decoder.conv.weight"].shape[2],
        )
    )
    own = {
        name: values for name, values in weights.items() if name.startswith(("decoder.", "joiner."))
    }
    network.load_state_dict(own)
    return network.eval().to(DEVICE)


@pytest.mark.numerics
@pytest.mark.parametrize("setting", ["c16_l4", "c16_l8", "c32_l8", "c8_l4"])
def test_the_beam_equals_icefalls_on_the_goldens(setting: str, golden_network: Transducer) -> None:
    expected = np.load(GOLDEN / "expected.npz")
    frames_TJ = golden_network.project(
        torch.from_numpy(expected[f"{setting}.enc"]).to(DEVICE)
    ).detach()
    for chunk_frames in (4, 7):
        cuts = range(chunk_frames, len(frames_TJ), chunk_frames)
        best = decoded(golden_network, frames_TJ, 4, cuts)[0]
        assert best.tokens == tuple(expected[f"{setting}.rnnt_beam"].tolist())
        assert best.score == pytest.approx(float(expected[f"{setting}.rnnt_beam_score"]), abs=1e-3)


def spell(units: Sequence[int], vocab: int = 30) -> Tensor:
    """Frames of `Speller` whose best path is `units`, with a little of the others."""
    frames_TJ = frames_of(len(units), (len(units), vocab)) * 0.1
    frames_TJ[range(len(units)), list(units)] += 9.0
    return frames_TJ


class Speller(PlainNetwork):
    """Gives the frames themselves as logits, so that what was said is what is heard."""

    def predict(self, context_NC: Tensor) -> Tensor:
        return torch.zeros((len(context_NC), 1), dtype=torch.float64, device=context_NC.device)

    def logits(self, frames_NJ: Tensor, predicted_NJ: Tensor) -> Tensor:
        return frames_NJ + predicted_NJ


def test_a_token_has_the_frame_that_it_was_spoken_in_and_is_never_merged() -> None:
    best = decoded(Speller(0, 30, 2), spell([0, 5, 5, 0, 7, 0]), 4, [2, 3])[0]
    assert best.tokens == (5, 5, 7)
    assert best.times == (1, 2, 4)
    assert all(-0.1 < log_prob < 0 for log_prob in best.token_log_probs)


def test_a_long_stream_costs_no_more_per_chunk_and_settles_what_all_paths_share() -> None:
    search, settled = new_search(network := PlainNetwork(4, 9, 2, sharpness=5.0), 4), []
    heard: list[Tensor] = []
    for turn in range(60):
        heard.append(frames_of(turn, (16, 9)))
        decode(search, heard[-1][None], [16 * turn])
        best, *others = search.hypotheses(0, 4)
        for one in (best, *others):
            assert list(one.tokens[: len(settled)]) == settled
        tail = search.tail(0, len(settled))
        assert (*settled, *tail.tokens) == best.tokens
        assert tail.num_stable == search.num_stable(0)
        settled = list(best.tokens[: tail.num_stable])
        assert search._history.window_entries <= 256
    assert len(settled) > 100
    frames_TJ = torch.cat(heard)
    expected = plain(network, frames_TJ, 4).nbest()
    assert_equal(search.hypotheses(0, 4), expected, len(frames_TJ))


def test_silence_adds_nothing() -> None:
    search = new_search(Speller(0, 30, 2), 4)
    decode(search, spell([4, 0, 6])[None], [0])
    for turn in range(5):
        decode(search, spell([0] * 200)[None], [3 + 200 * turn])
    assert search.hypotheses(0, 1)[0].tokens == (4, 6)
    assert search._history.window_entries == 32


def test_a_chunk_is_begun_without_a_look_at_the_device() -> None:
    """The operators of a frame take shapes from the host alone, and are few."""
    config = TransducerConfig(36, 40, 48, vocab_size=60, context_size=2)
    search = new_search(Transducer(config).eval(), 4, 3)

    def operators(num_frames: int) -> list[str]:
        frames_NTJ = torch.zeros((3, num_frames, 40), device=DEVICE)
        chunk = ChunkRows(np.arange(3), np.full(3, num_frames), np.zeros(3, dtype=np.int64))
        with _Operators() as seen:
            search.begin(frames_NTJ, chunk)()
        return seen.names

    short, long = operators(4), operators(8)
    assert not {"_local_scalar_dense", "item", "nonzero", "is_nonzero"} & {*short, *long}
    assert (len(long) - len(short)) / 4 <= MOST_OPERATORS


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU is never waited for")
def test_a_chunk_is_begun_without_waiting_for_a_gpu() -> None:
    network = PlainNetwork(1, 7, 2)
    scorer = HotwordScorer([True] * 7, DEVICE)
    scorer.assign([0, 1], "key", ContextGraph.build([(2, 3)], 1.0, vocab_size=7))
    search = new_search(network, 4, 2, scorers=[scorer])
    frames_NTJ = frames_of(0, (2, 6, 7))
    decode(search, frames_NTJ, [0, 0])
    chunk = ChunkRows(np.array([1, 0]), np.array([3, 6]), np.array([6, 6]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        finish = search.begin(frames_NTJ, chunk)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    finish()


def test_frames_on_another_device_are_refused() -> None:
    search = new_search(PlainNetwork(0, 5, 1), 2)
    with pytest.raises(StreamStateError, match="frames are on meta"):
        decode(search, torch.zeros((1, 2, 5), device="meta"), [0])


def test_half_precision_logits_are_read_as_fp32() -> None:
    logits_XV = frames_of(0, (8, 40)).bfloat16()
    half, whole = best_units(logits_XV, 4, 40), best_units(logits_XV.float(), 4, 40)
    assert half.log_prob_NBW.dtype == torch.float32
    assert half.log_prob_NBW.equal(whole.log_prob_NBW)


def test_a_transducer_offers_the_beam_with_four_paths() -> None:
    kind = transducer_searches(PlainNetwork(0, 5, 2))["transducer_beam"]
    assert (kind.head, kind.beam_size, kind.kept(0), kind.most_told(3)) == ("joiner", 4, 4, 3)
    assert "rescoring" not in kind.honours
    assert isinstance(kind.make(SearchSettings(device=CPU)), TransducerBeamSearch)


def test_the_end_of_a_text_keeps_the_order_by_score_per_token(tmp_path: Path) -> None:
    """In a group of decoders: a longer hypothesis of a lower score stays before a shorter one."""
    entries = {("<unk>",): (-1.0, 0.0), ("</s>",): (-0.5, 0.0), ("<s>",): (-9.0, 0.0)}
    scorer = scorer_of(write(tmp_path, arpa(entries)), weight=0.01, unit_bonus=0.0, symbols=SYMBOLS)
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


class _Operators(TorchDispatchMode):
    """Names of the operators that compute or move something; views cost nothing on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return result
