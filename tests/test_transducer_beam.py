"""The modified beam search of a transducer, beside one that takes paths one by one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oasr_backend.decoders.base import SearchSettings
from oasr_backend.decoders.bias.context_graph import ContextGraph
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.decoders.chunk import ChunkRows, Finish
from oasr_backend.decoders.transducer.beam.frame import best_units
from oasr_backend.decoders.transducer.beam.search import TransducerBeamSearch
from oasr_backend.decoders.transducer.kinds import transducer_searches
from oasr_backend.errors import StreamStateError
from oasr_backend.models.transducer import Transducer, TransducerConfig
from tests.decoder_groups import CPU
from tests.ngrams import DEVICE
from tests.transducer_beams import (
    PlainNetwork,
    assert_equal,
    decode,
    decoded,
    frames_of,
    new_search,
    plain,
)

GOLDEN = Path(__file__).parent / "golden" / "zip_rnnt_small"


#: Of a frame, the network's own five among them.
MOST_OPERATORS = 32


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


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Refuses what waits for a GPU, where there is one."""
    if DEVICE.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        # PyTorch says that the mode is a prototype, each time that it is set.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("has_hotwords", [False, True])
def test_a_chunk_is_begun_without_a_look_at_the_device(has_hotwords: bool) -> None:
    """The operators of a frame take shapes from the host alone, and are few."""
    scorer = HotwordScorer([True] * 60, DEVICE)
    scorer.assign(range(3), "key", ContextGraph.build([(2, 3)], 1.0, vocab_size=60))
    config = TransducerConfig(36, 40, 48, vocab_size=60, context_size=2)
    scorers = [scorer] if has_hotwords else []
    search = new_search(Transducer(config).eval(), 4, 3, scorers=scorers)

    def begin(num_frames: int) -> Finish:
        frames_NTJ = torch.zeros((3, num_frames, 40), device=DEVICE)
        num_frames_N = np.array([num_frames - 1, num_frames, num_frames])
        chunk = ChunkRows(np.arange(3), num_frames_N, np.zeros(3, dtype=np.int64))
        return search.begin(frames_NTJ, chunk)

    def operators(num_frames: int) -> list[str]:
        with no_waiting(), _Operators() as seen:
            finish = begin(num_frames)
        finish()
        return seen.names

    begin(2)()  # Puts the tables of the phrases on the device.
    short, long = operators(4), operators(8)
    assert not {"_local_scalar_dense", "item", "nonzero", "is_nonzero"} & {*short, *long}
    assert has_hotwords or (len(long) - len(short)) / 4 <= MOST_OPERATORS


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
