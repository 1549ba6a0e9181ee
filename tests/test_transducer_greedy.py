"""Greedy search over a transducer: the head of the step, and the search that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oasr_backend.cache import StreamStateSpec
from oasr_backend.cache.state import SlotStates, StagedSlotTensor
from oasr_backend.decoders.base import CTC_SEARCHES, SearchKind, SearchSettings
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.decoders.chunk import ChunkRows
from oasr_backend.decoders.kinds import DecoderKind
from oasr_backend.decoders.option_check import check_search, resolve_search
from oasr_backend.decoders.transducer.greedy import TransducerGreedySearch
from oasr_backend.decoders.transducer.kinds import transducer_searches
from oasr_backend.errors import ConfigError, InvalidRequestError
from oasr_backend.models.base import EncoderCaches
from oasr_backend.models.transducer import (
    GreedyTransducerHead,
    JoinerHead,
    StatelessPredictor,
    Transducer,
    TransducerConfig,
)
from oasr_backend.options import StreamOptions
from tests.conftest import GOLDEN_DIR
from tests.reference import transducer as reference
from tests.zipformer_goldens import zip_goldens

pytestmark = pytest.mark.numerics

CPU = torch.device("cpu")
#: A blank that is not 0 shows where 0 is taken for it.
SMALL = TransducerConfig(
    model_dim=6, joiner_dim=10, embedding_dim=8, vocab_size=7, context_size=2, blank_id=2
)
GOLDENS = [name for name, golden in zip_goldens().items() if golden.has_transducer]
#: Sums of some dozen float32 products, against float64.
CLOSE = 1e-4
STREAM_FRAMES = 14
NUM_STREAMS = 5


@cache
def small(context_size: int) -> Transducer:
    """Random, and blank at about half of the frames."""
    torch.manual_seed(context_size)
    network = Transducer(replace(SMALL, context_size=context_size))
    for weight in network.parameters():
        torch.nn.init.normal_(weight)
    network.joiner.output_linear.bias.data[SMALL.blank_id] += 2.0
    return network.eval().requires_grad_(False)


@cache
def golden_weights() -> Mapping[str, Tensor]:
    path = GOLDEN_DIR / "zip_rnnt_small" / "pretrained.pt"
    model = torch.load(path, weights_only=True)["model"]
    return {key: one for key, one in model.items() if key.startswith(("decoder.", "joiner."))}


@cache
def golden_network() -> Transducer:
    weights = golden_weights()
    joiner_dim, model_dim = weights["joiner.encoder_proj.weight"].shape
    vocab_size, embedding_dim = weights["decoder.embedding.weight"].shape
    context_size = weights["decoder.conv.weight"].shape[2]
    config = TransducerConfig(model_dim, joiner_dim, embedding_dim, vocab_size, context_size)
    network = Transducer(config)
    network.load_state_dict(dict(weights))
    return network.eval().requires_grad_(False)


def oracle(network: Transducer) -> reference.Transducer:
    weights = {name: one.numpy() for name, one in network.state_dict().items()}
    return reference.Transducer(weights, network.blank_id)


class Streams:
    """Slots with a head's state and a row of the search, as an engine has them."""

    def __init__(self, network: Transducer, num_slots: int = 1) -> None:
        self.head = GreedyTransducerHead(network)
        self.states = SlotStates(self.head.state_specs, num_slots, CPU)
        self.search = TransducerGreedySearch(network.blank_id)
        self.search.grow(num_slots)
        self.heard = [0] * num_slots

    def open(self, slot: int) -> None:
        self.states.open(slot)
        self.search.reset_rows([slot])
        self.heard[slot] = 0

    def step(self, encoded_BTD: Tensor, slots: Sequence[int], num_frames: Sequence[int]) -> None:
        counts_B = torch.tensor(num_frames)
        caches = EncoderCaches(
            (), torch.zeros_like(counts_B), counts_B, self.states.staged_views(list(slots))
        )
        output_BT2 = self.head.step(encoded_BTD, caches)
        assert (output_BT2.dtype, output_BT2.shape[2]) == (torch.int32, 2)
        caches.store()
        chunk = ChunkRows(
            np.array(slots), np.array(num_frames), np.array([self.heard[slot] for slot in slots])
        )
        self.search.begin(output_BT2, chunk)()
        for slot, count in zip(slots, num_frames, strict=True):
            self.heard[slot] += count

    def found(self, slot: int = 0) -> reference.Found:
        (best,) = self.search.hypotheses(slot, 1)
        return reference.Found(
            list(best.tokens), list(best.times), list(best.token_log_probs), best.score
        )


def assert_same(found: reference.Found, expected: reference.Found) -> None:
    assert (found.tokens, found.times) == (expected.tokens, expected.times)
    assert found.log_probs == pytest.approx(expected.log_probs, abs=CLOSE)
    assert found.score == pytest.approx(expected.score, abs=CLOSE)


# The goldens


@pytest.mark.parametrize("name", GOLDENS)
def test_tokens_and_their_frames_are_icefalls(name: str) -> None:
    golden = zip_goldens()[name]
    streams = Streams(golden_network())
    encoded_BTD = torch.from_numpy(golden["enc"])[None]
    for chunk_BTD in encoded_BTD.split(golden.chunk_size // 2, dim=1):
        streams.step(chunk_BTD, [0], [chunk_BTD.shape[1]])
    found = streams.found()
    assert found.tokens == golden["rnnt_greedy"].tolist()
    assert found.times == golden["rnnt_greedy_frames"].tolist()
    assert_same(found, oracle(golden_network()).greedy(golden["enc"]))


def test_log_probs_of_the_start_context_are_icefalls() -> None:
    network, golden = golden_network(), zip_goldens()[GOLDENS[0]]
    frames_TJ = JoinerHead(network)(torch.from_numpy(golden["enc"])[None])[0]
    predicted_1J = network.predict(torch.tensor([network.start_context]))
    log_probs_TV = network.logits(frames_TJ, predicted_1J).log_softmax(-1)
    np.testing.assert_allclose(log_probs_TV, golden["rnnt_first_logp"], rtol=0, atol=CLOSE)


# Chunks and batches


@cache
def frames_of(context_size: int) -> tuple[Tensor, list[reference.Found]]:
    """(S, T, D) frames of some streams, and what the reference hears in them."""
    torch.manual_seed(100 + context_size)
    encoded_STD = torch.randn(NUM_STREAMS, STREAM_FRAMES, SMALL.model_dim)
    expected = [oracle(small(context_size)).greedy(one.numpy()) for one in encoded_STD]
    assert all(0 < len(one.tokens) < STREAM_FRAMES for one in expected)
    return encoded_STD, expected


#: How many frames each stream of a step brings.
STEPS = st.dictionaries(st.integers(0, NUM_STREAMS - 1), st.integers(0, 6), min_size=1)


@settings(max_examples=40, deadline=None)
@given(plan=st.lists(STEPS, max_size=8), context_size=st.integers(1, 3), chunk=st.integers(1, 6))
def test_any_cut_and_any_batch_hear_what_the_reference_hears(
    plan: list[dict[int, int]], context_size: int, chunk: int
) -> None:
    encoded_STD, expected = frames_of(context_size)
    streams = Streams(small(context_size), NUM_STREAMS)
    rest = [dict.fromkeys(range(NUM_STREAMS), chunk)] * STREAM_FRAMES
    for step in (*plan, *rest):
        left = {slot: STREAM_FRAMES - streams.heard[slot] for slot in step}
        counts = {slot: min(step[slot], chunk, left[slot]) for slot in step}
        # A window's rest is padding, which no result may read.
        encoded_BTD = torch.full((len(step), chunk, SMALL.model_dim), torch.nan)
        for row, (slot, count) in enumerate(counts.items()):
            first = streams.heard[slot]
            encoded_BTD[row, :count] = encoded_STD[slot, first : first + count]
        streams.step(encoded_BTD, list(counts), list(counts.values()))
    for slot, one in enumerate(expected):
        assert_same(streams.found(slot), one)


def test_a_slots_next_stream_starts_afresh() -> None:
    encoded_STD, expected = frames_of(2)
    streams = Streams(small(2))
    for encoded_TD, one in zip(encoded_STD, expected, strict=True):
        streams.open(0)
        streams.step(encoded_TD[None], [0], [STREAM_FRAMES])
        assert_same(streams.found(), one)


def test_a_step_that_fails_before_it_is_stored_changes_nothing() -> None:
    encoded_STD, expected = frames_of(2)
    streams = Streams(small(2))
    views = streams.states.staged_views([0])
    counts_B = torch.tensor([STREAM_FRAMES])
    streams.head.step(encoded_STD[:1], EncoderCaches((), counts_B, counts_B, views))
    streams.step(encoded_STD[:1], [0], [STREAM_FRAMES])
    assert_same(streams.found(), expected[0])


def test_a_transcript_is_told_from_any_token_on() -> None:
    encoded_STD, expected = frames_of(2)
    streams = Streams(small(2))
    streams.step(encoded_STD[:1], [0], [STREAM_FRAMES])
    tokens = expected[0].tokens
    assert streams.search.num_stable(0) == len(tokens)
    for skip in range(len(tokens) + 1):
        assert streams.search.tail(0, skip) == (tokens[skip:], len(tokens))
        (rest,) = streams.search.hypotheses(0, 5, skip=skip)
        assert (list(rest.tokens), list(rest.times)) == (tokens[skip:], expected[0].times[skip:])
    streams.search.reset_rows([0])
    assert streams.found() == ([], [], [], 0.0)


# The network


@pytest.mark.parametrize("context_size", [1, 2, 3])
def test_predictions_are_the_references_for_every_context(context_size: int) -> None:
    network = small(context_size)
    torch.manual_seed(0)
    context_NC = torch.randint(-1, SMALL.vocab_size, (50, context_size))
    expected = [oracle(network).predict(context) for context in context_NC.tolist()]
    np.testing.assert_allclose(network.predict(context_NC), expected, rtol=0, atol=CLOSE)


def test_a_predictor_follows_weights_that_are_loaded_until_it_is_put_to_use() -> None:
    torch.manual_seed(0)
    one, other = StatelessPredictor(SMALL), StatelessPredictor(SMALL).eval()
    context_NC = torch.tensor([[-1, 2], [3, 4]])
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(context_NC), other(context_NC))
    assert torch.equal(one.eval()(context_NC), other(context_NC))
    assert other.train().table_XE.numel() == 0


@pytest.mark.parametrize("penalty", [0.5, 3.0, 100.0])
def test_a_penalty_is_taken_off_blanks_logit(penalty: float) -> None:
    encoded_STD, expected = frames_of(2)
    network = Transducer(small(2).config)
    network.load_state_dict(small(2).state_dict())
    network.eval().requires_grad_(False).blank_penalty = penalty
    streams = Streams(network)
    streams.step(encoded_STD[:1], [0], [STREAM_FRAMES])
    assert_same(streams.found(), oracle(network).greedy(encoded_STD[0].numpy(), penalty))
    assert len(streams.found().tokens) >= len(expected[0].tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_whole_contexts(dtype: torch.dtype) -> None:
    network = Transducer(SMALL).eval().requires_grad_(False).to(dtype)
    head = GreedyTransducerHead(network).to(dtype)
    states = SlotStates(head.state_specs, 1, CPU, dtype=dtype)
    caches = EncoderCaches((), torch.zeros(1), torch.tensor([4]), states.staged_views([0]))
    packed_BT2 = head.step(torch.randn(1, 4, SMALL.model_dim, dtype=dtype), caches)
    assert packed_BT2[..., 1].contiguous().view(torch.float32).le(0).all()
    caches.store()
    assert states.buffer_of("transducer_context").dtype == torch.int64


@pytest.mark.parametrize("context_size", [1, 2, 3])
def test_a_device_hears_what_the_host_hears(context_size: int) -> None:
    """With frames that are none behind a row's end, as windows have them."""
    head, (encoded_STD, expected) = (
        GreedyTransducerHead(small(context_size)),
        frames_of(context_size),
    )
    encoded_STD = encoded_STD.clone()
    encoded_STD[1, 5:] = torch.nan
    context_SC = head.start_C.expand(NUM_STREAMS, -1)
    (host_ST2, host_contexts), (device_ST2, device_contexts) = (
        search(encoded_STD, context_SC) for search in (head._search_on_host, head._search_on_device)
    )
    assert host_ST2.dtype == device_ST2.dtype == torch.int32
    for row, one in enumerate(expected):
        frames = 5 if row == 1 else STREAM_FRAMES
        assert torch.equal(host_ST2[row, :frames, 0], device_ST2[row, :frames, 0])
        assert torch.equal(host_contexts[: frames + 1, row], device_contexts[: frames + 1, row])
        host_T, device_T = (
            two_ST2[row, :frames, 1].contiguous().view(torch.float32)
            for two_ST2 in (host_ST2, device_ST2)
        )
        torch.testing.assert_close(host_T, device_T, rtol=0, atol=CLOSE)
        units_T = device_ST2[row, :frames, 0]
        tokens = units_T[units_T != SMALL.blank_id].tolist()
        assert tokens == one.tokens[: len(tokens)]


def test_a_step_waits_for_no_value() -> None:
    """Tensors without values refuse to be looked at, as those of a captured step would."""
    head = GreedyTransducerHead(Transducer(SMALL).eval().requires_grad_(False)).to("meta")
    encoded_BTD = torch.zeros(3, 5, SMALL.model_dim, device="meta")
    buffer_SC, slots_B = torch.zeros(4, 2, dtype=torch.int64).to("meta"), torch.arange(3).to("meta")
    state = StagedSlotTensor(buffer_SC, slots_B)
    caches = EncoderCaches((), slots_B, slots_B, {"transducer_context": state})
    assert head.step(encoded_BTD, caches).shape == (3, 5, 2)
    caches.store()


def test_heads_name_what_they_keep() -> None:
    assert JoinerHead(small(2)).state_specs == ()
    assert GreedyTransducerHead(small(3)).state_specs == (
        StreamStateSpec("transducer_context", (3,), dtype=torch.int64),
    )
    assert small(3).start_context == (-1, -1, SMALL.blank_id)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_dim": 0}, "the transducer: model_dim=0 is below 1; give 1 or more"),
        ({"joiner_dim": 1.5}, "joiner_dim=1.5 is no whole number"),
        ({"context_size": 0}, "context_size=0 is below 1"),
        ({"blank_id": 7}, "blank_id=7 is none of the 7 units; give one below 7"),
        ({"embedding_dim": 6}, "embedding_dim=6 is no multiple of 4"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SMALL, **change)
    assert told in str(caught.value)


# The search kinds


def test_the_greedy_search_is_what_streams_get_and_takes_no_scorer() -> None:
    searches = transducer_searches(small(2))
    greedy = next(iter(searches.values()))
    assert (greedy.name, greedy.head, greedy.honours) == (
        "transducer_greedy", GreedyTransducerHead.name, frozenset(),
    )  # fmt: skip
    settings = SearchSettings(CPU)
    assert isinstance(greedy.make(settings), TransducerGreedySearch)
    scorer = HotwordScorer([False] * SMALL.vocab_size, CPU)
    with pytest.raises(ConfigError, match="transducer_greedy weighs no alternatives; leave"):
        greedy.make(replace(settings, scorers=(scorer,)))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nbest": 2}, "nbest=2 is outside 1 .. 1, which transducer_greedy can keep; lower nbest"),
        ({"hotwords": "a"}, "hotwords='a' needs a search that can honour it, .* leave hotwords"),
        ({"use_lm": True}, "use_lm=True needs a search that can honour it, .* leave use_lm"),
        ({"rescoring": True}, "rescoring=True .* which transducer_greedy cannot; leave rescoring"),
    ],
)
def test_what_the_greedy_search_cannot_honour_is_refused(
    options: dict[str, Any], told: str
) -> None:
    searches = transducer_searches(small(2))
    asked = resolve_search(searches, StreamOptions(**options))
    assert asked.decoder == "transducer_greedy"
    with pytest.raises(InvalidRequestError, match=told):
        check_search(searches, asked)


def test_a_search_of_another_head_is_told_with_what_the_checkpoint_lacks() -> None:
    transducer = transducer_searches(small(2))
    for name in transducer:
        told = f"decoder='{name}' needs a transducer, and this .* without one; send one of greedy,"
        with pytest.raises(InvalidRequestError, match=told):
            check_search(CTC_SEARCHES, StreamOptions(decoder=name))
    for name in CTC_SEARCHES:
        told = f"decoder='{name}' needs a CTC head, and .* without one; send one of transducer_gre"
        with pytest.raises(InvalidRequestError, match=told):
            check_search(transducer, StreamOptions(decoder=name))
    greedy = {"greedy": CTC_SEARCHES["greedy"]}
    with pytest.raises(InvalidRequestError, match=r"is a search that .* does not offer; .* greedy"):
        check_search(greedy, StreamOptions(decoder="prefix_beam"))
    with pytest.raises(InvalidRequestError, match="decoder='beam' is unknown; send one of greedy"):
        check_search(greedy, StreamOptions(decoder="beam"))


WIDE = SearchKind("wide", lambda _: TransducerGreedySearch(0), honours=frozenset({"beam_size"}))


@pytest.mark.parametrize(("asked", "kept"), [(0, 4), (1, 1), (10, 10), (64, 64)])
def test_a_beam_size_of_0_is_the_searchs_own(asked: int, kept: int) -> None:
    search = replace(WIDE, beam_size=4)
    assert DecoderKind.of(StreamOptions(beam_size=asked), search).beam_size == kept
    assert replace(search, honours=frozenset()).kept(asked) == 1
    assert WIDE.kept(0) == 10


@pytest.mark.parametrize("beam_size", [0, 65, 4.0])
def test_a_search_that_keeps_what_no_stream_may_ask_for_is_refused(beam_size: Any) -> None:
    with pytest.raises(ConfigError, match=f"the search 'wide': beam_size={beam_size} is "):
        replace(WIDE, beam_size=beam_size)
