"""Attention rescoring by itself: its scores, its kept frames, and the cost of a fault."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.decoders.second_pass import rescorer
from oasr_backend.decoders.second_pass.base import Memory, NBests, NoDecoder
from oasr_backend.decoders.second_pass.encoded_frames import EncodedFrames, Taken
from oasr_backend.decoders.second_pass.rescorer import Rescorer
from oasr_backend.models.rescoring import RescoringDecoder
from oasr_backend.types import Hypothesis
from tests.conftest import GOLDEN_DIR
from tests.decoder_checkpoint import MODEL_DIM, UNIT, reference, write_checkpoint
from tests.same_results import TOLERANCE, assert_same_results

KINDS = ("transformer", "bitransformer")
CPU = torch.device("cpu")
BLOCK = 4
#: A slot whose stream is not kept.
STRANGER = 500
CTC_WEIGHT = 0.5


@pytest.fixture(scope="module", params=KINDS, name="kind")
def _kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", name="decoder")
def _decoder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> RescoringDecoder:
    return loaded(tmp_path_factory.mktemp("checkpoint") / kind, kind)


def loaded(directory: Path, kind: str) -> RescoringDecoder:
    decoder = open_checkpoint(write_checkpoint(directory, kind)).load().second_pass
    assert isinstance(decoder, RescoringDecoder)
    decoder.prepare(device=CPU, dtype=torch.float32)
    return decoder


def frames(seed: int, count: int) -> Tensor:
    return torch.randn(count, MODEL_DIM, generator=torch.Generator().manual_seed(seed))


def memory_of(encoded: list[Tensor]) -> Memory:
    longest = max(map(len, encoded))
    padded = [torch.nn.functional.pad(one, (0, 0, 0, longest - len(one))) for one in encoded]
    is_real = [torch.arange(longest) < len(one) for one in encoded]
    return Memory(torch.stack(padded), torch.stack(is_real))


#: Ragged in every way: streams, hypotheses, tokens; with an empty one among others and alone.
NBESTS: list[list[tuple[int, ...]]] = [
    [(5, 6, 7, 8, 9, 9, 9, 10), (5, 6), ()],
    [()],
    [(1,), (2,), (3, 4, 3, 4, 3), (94,)],
    [tuple(range(1, 60))],
]
ENCODED = [frames(0, 13), frames(1, 1), frames(2, 40), frames(3, 31)]


@functools.cache
def expected_scores(kind: str) -> list[list[float]]:
    oracle = reference(kind)
    return [
        [oracle.score(tokens, encoded_TD) for tokens in nbest]
        for nbest, encoded_TD in zip(NBESTS, ENCODED, strict=True)
    ]


@pytest.mark.numerics
def test_scores_are_those_of_pytorchs_own_decoder_layer(
    decoder: RescoringDecoder, kind: str
) -> None:
    found = decoder(NBESTS, memory_of(ENCODED))
    for scores, expected in zip(found, expected_scores(kind), strict=True):
        np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.numerics
def test_scores_are_wenets_own(decoder: RescoringDecoder, kind: str) -> None:
    text = (GOLDEN_DIR / "attention_scores.json").read_text(encoding="utf-8")
    found = decoder(NBESTS, memory_of(ENCODED))
    for scores, expected in zip(found, json.loads(text)[kind], strict=True):
        np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.numerics
def test_a_score_depends_on_no_other_hypothesis_and_no_other_stream(
    decoder: RescoringDecoder,
) -> None:
    together = decoder(NBESTS, memory_of(ENCODED))
    for scores, nbest, encoded_TD in zip(together, NBESTS, ENCODED, strict=True):
        for score, tokens in zip(scores, nbest, strict=True):
            (alone,) = decoder([[tokens]], memory_of([encoded_TD]))
            assert score == pytest.approx(alone[0], abs=TOLERANCE)


@pytest.mark.numerics
def test_few_logits_at_a_time_give_the_same_scores(
    decoder: RescoringDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = decoder(NBESTS, memory_of(ENCODED))
    monkeypatch.setattr("oasr_backend.models.attention_decoder._MOST_LOGITS", 3 * 96)
    for scores, expected in zip(decoder(NBESTS, memory_of(ENCODED)), whole, strict=True):
        np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)


def new_frames(*, max_frames: int = 1000) -> EncodedFrames:
    return EncodedFrames(
        block_frames=BLOCK,
        model_dim=MODEL_DIM,
        max_frames=max_frames,
        device=CPU,
        dtype=torch.float32,
    )


def feed(store: EncodedFrames, pieces: dict[int, Tensor]) -> None:
    """One step; a piece of fewer than BLOCK frames is followed by NaN."""
    rows = [
        torch.cat([piece, torch.full((BLOCK - len(piece), MODEL_DIM), float("nan"))])
        for piece in pieces.values()
    ]
    counts = [len(piece) for piece in pieces.values()]
    store.append(np.array(list(pieces)), np.array(counts), torch.stack(rows))


def heard_by(store: EncodedFrames, slots: list[int]) -> Memory:
    """What the encoder heard of these streams, which are kept as before."""
    taken = [Taken(list(store._blocks[slot]), store.num_frames(slot)) for slot in slots]
    return store.gather(taken)


def test_kept_frames_come_back_whole_whatever_else_comes_and_goes() -> None:
    """Streams open, step, end short and close at random; none sees another's frames, or NaN."""
    chance, store = np.random.default_rng(0), new_frames()
    heard: dict[int, Tensor] = {}
    ended: set[int] = set()
    for step in range(120):
        if len(heard) < 12 and chance.random() < 0.4:
            store.open(step)
            heard[step] = torch.zeros(0, MODEL_DIM)
        going_on = [one for one in heard if one not in ended and chance.random() < 0.7]
        counts = [
            int(chance.integers(1, BLOCK)) if chance.random() < 0.1 else BLOCK for _ in going_on
        ]
        pieces = {one: frames(step * 100 + one, n) for one, n in zip(going_on, counts, strict=True)}
        if pieces:
            feed(store, {**pieces, STRANGER: frames(step, BLOCK)})
        for one, piece in pieces.items():
            heard[one] = torch.cat([heard[one], piece])
            if len(piece) < BLOCK:
                ended.add(one)
        with_frames = [one for one in heard if len(heard[one])]
        if with_frames:
            memory = heard_by(store, with_frames)
            for row, one in enumerate(with_frames):
                count = len(heard[one])
                assert torch.equal(memory.encoded_STD[row, :count], heard[one])
                assert not memory.encoded_STD[row, count:].any()
                assert memory.is_real_ST[row].sum() == count == store.num_frames(one)
        for one in [one for one in heard if chance.random() < 0.05]:
            store.close(one)
            del heard[one]
        store.check_integrity(heard)
    assert store.num_blocks > 32, "the buffer grew"
    for one in heard:
        store.close(one)
    assert store.num_free_blocks == store.num_blocks


def test_a_server_that_has_seen_its_peak_allocates_nothing() -> None:
    store = new_frames()
    for round_ in range(3):
        for one in range(10):
            store.open(one)
        for step in range(8):
            feed(store, {one: frames(step, BLOCK) for one in range(10)})
        if round_ == 0:
            buffer = store._buffer_PTD
        for one in range(10):
            store.close(one)
    assert store._buffer_PTD is buffer


def test_a_stream_that_gets_too_long_gives_its_blocks_back_and_disturbs_no_other() -> None:
    store = new_frames(max_frames=2 * BLOCK)
    for one in (1, 2):
        store.open(one)
    feed(store, {1: frames(0, BLOCK)})
    for seed in (1, 2):
        feed(store, {1: frames(seed, BLOCK), 2: frames(seed, BLOCK)})
    assert (1 in store, 2 in store) == (False, True)
    assert store.num_free_blocks == store.num_blocks - 2
    assert torch.equal(
        heard_by(store, [2]).encoded_STD[0], torch.cat([frames(1, BLOCK), frames(2, BLOCK)])
    )
    store.check_integrity({1, 2})


def hypotheses(nbest: list[tuple[int, ...]]) -> list[Hypothesis]:
    return [Hypothesis(tokens, -float(rank)) for rank, tokens in enumerate(nbest)]


def filled(decoder: RescoringDecoder) -> Rescorer:
    """Every stream of NBESTS, heard."""
    made = Rescorer(decoder, new_frames(), ctc_weight=CTC_WEIGHT)
    for one, encoded_TD in enumerate(ENCODED):
        made.open(one)
        for start in range(0, len(encoded_TD), BLOCK):
            feed(made.frames, {one: encoded_TD[start : start + BLOCK]})
    return made


def rescored(made: Rescorer, nbests: NBests) -> dict[int, list[Hypothesis]]:
    """From end to end, with nothing in between."""
    rescoring = made.take(nbests)
    if rescoring is None:
        return {}
    rescoring.weigh()
    found = rescoring.settle()
    made.check_integrity(frozenset(ALL))
    return found


ALL = {one: hypotheses(nbest) for one, nbest in enumerate(NBESTS)}


@pytest.mark.numerics
@pytest.mark.parametrize("most_rows", [1, 200, 10_000])
def test_the_new_order_is_that_of_the_combined_scores(
    decoder: RescoringDecoder, kind: str, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of passes, none of which is wider than it may be."""
    monkeypatch.setattr(rescorer, "_MOST_ROWS", most_rows)
    sizes: list[tuple[int, int]] = []
    hook = decoder.left.register_forward_pre_hook(
        lambda _, inputs: sizes.append((inputs[0].shape[0], inputs[0].numel()))
    )
    found = rescored(filled(decoder), ALL)
    hook.remove()
    assert all(rows <= most_rows or streams == 1 for streams, rows in sizes)
    assert (len(sizes) == 1) == (most_rows == 10_000)
    for one, before in ALL.items():
        pairs = zip(expected_scores(kind)[one], before, strict=True)
        scored = [
            (score + CTC_WEIGHT * hypothesis.score, hypothesis) for score, hypothesis in pairs
        ]
        scored.sort(key=lambda pair: -pair[0])
        expected = [hypothesis._replace(score=score) for score, hypothesis in scored]
        assert_same_results(found[one], expected)
    assert any(found[one][0].tokens != ALL[one][0].tokens for one in ALL)


def test_equal_scores_keep_the_order_of_the_beam(decoder: RescoringDecoder) -> None:
    twins = [Hypothesis((3,), -1.0, times=(1,)), Hypothesis((3,), -1.0, times=(2,))]
    assert [one.times for one in rescored(filled(decoder), {0: twins})[0]] == [(1,), (2,)]


def test_a_stream_without_frames_or_unknown_is_left_as_it_is(decoder: RescoringDecoder) -> None:
    made = Rescorer(decoder, new_frames(), ctc_weight=CTC_WEIGHT)
    made.open(1)
    assert made.take({1: hypotheses([()]), 2: hypotheses([()])}) is None
    assert 1 not in made, "it has ended"


def test_a_fault_costs_the_streams_of_its_pass_their_new_order_and_nothing_else(
    decoder: RescoringDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rescorer, "_MOST_ROWS", 1)

    def fault(_module: torch.nn.Module, inputs: tuple[Tensor, Memory]) -> None:
        if inputs[0].shape[1] == 4:
            raise torch.OutOfMemoryError("full")

    hook = decoder.left.register_forward_pre_hook(fault)
    found = rescored(filled(decoder), ALL)
    hook.remove()
    assert set(found) == {0, 1, 3}
    assert "event=rescoring_failed" in caplog.text


def test_scores_that_are_not_finite_change_no_order(
    decoder: RescoringDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    made = filled(decoder)
    made.open(9)
    nan_BTD = torch.full((1, BLOCK, MODEL_DIM), float("nan"))
    made.frames.append(np.array([9]), np.array([BLOCK]), nan_BTD)
    found = rescored(made, {**ALL, 9: hypotheses([(1, 2), (3,)])})
    assert set(found) == set(ALL)
    assert "not finite" in caplog.text


def test_no_room_for_frames_gives_up_rescoring_of_that_steps_streams(
    decoder: RescoringDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = filled(decoder)

    def full() -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(made.frames, "_double", full)
    step = torch.zeros(2, BLOCK, MODEL_DIM)
    for _ in range(made.frames.num_free_blocks // 2 + 1):
        made.keep(np.array([2, 3]), np.array([BLOCK, BLOCK]), step)
    assert [one in made.frames for one in ALL] == [True, True, False, False]
    assert "event=rescoring_given_up" in caplog.text
    made.check_integrity(frozenset(ALL))


def test_frames_that_were_taken_stay_what_they_are_while_streams_come_and_go(
    decoder: RescoringDecoder,
) -> None:
    """Between the end of a stream and the outcome another one may have its slot."""
    expected = rescored(filled(decoder), ALL)
    made = filled(decoder)
    rescoring = made.take(ALL)
    assert rescoring is not None
    made.check_integrity(frozenset())
    for slot in ALL:
        made.close(slot)
        made.open(slot)
    for seed in range(20):
        feed(made.frames, {slot: frames(seed, BLOCK) for slot in ALL})
    made.check_integrity(frozenset(ALL))
    rescoring.weigh()
    assert rescoring.settle() == expected
    assert rescoring.settle() == {}
    made.check_integrity(frozenset(ALL))
    for slot in ALL:
        made.close(slot)
    assert made.frames.num_free_blocks == made.frames.num_blocks


def test_the_ends_of_a_sentence_are_the_last_unit_unless_train_yaml_names_others(
    tmp_path: Path,
) -> None:
    decoder = loaded(tmp_path / "usual", "transformer")
    assert (decoder.sos, decoder.eos) == (UNIT, UNIT)
    path = write_checkpoint(tmp_path / "named", "transformer") / "train.yaml"
    text = path.read_text(encoding="utf-8")
    changed = text.replace(
        "tokenizer_conf:\n", "tokenizer_conf:\n  special_tokens: {<sos>: 2, <eos>: 3}\n"
    )
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    named = open_checkpoint(path.parent).load().second_pass
    assert isinstance(named, RescoringDecoder)
    assert (named.sos, named.eos) == (2, 3)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("normalize_before", False, ["normalize_before=False", "True"]),
        ("input_layer", "embed_learnable_pe", ["input_layer='embed_learnable_pe'", "'embed'"]),
        ("use_output_layer", False, ["use_output_layer=False"]),
        ("n_kv_head", 2, ["n_kv_head=2", "4"]),
        ("attention_heads", 5, ["attention_heads=5", "divisor of 64"]),
        ("activation_type", "snake", ["activation_type='snake'", "relu"]),
        ("linear_units", 81, ["final.pt does not match", "feed_forward"]),
        ("num_blocks", 3, ["decoders.2"]),
        ("num_blocks", "three", ["three"]),
        ("moe", True, ["decoder_conf.moe=True"]),
    ],
)
def test_a_decoder_that_cannot_be_used_costs_rescoring_alone(
    tmp_path: Path, option: str, value: object, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", **{option: value})
    checkpoint = open_checkpoint(directory).load()
    assert isinstance(checkpoint.second_pass, NoDecoder)
    for word in ["cannot be used", *words]:
        assert word in checkpoint.second_pass.reason
    assert len(checkpoint.second_pass.reason) < 300
    assert f"event=no_rescoring {checkpoint.second_pass.reason[:20]}" in caplog.text


def test_a_decoder_of_values_that_are_not_finite_costs_rescoring_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint")
    weights = torch.load(directory / "final.pt", weights_only=True)
    name = next(name for name in weights if name.startswith("decoder."))
    weights[name].view(-1)[0] = torch.nan
    torch.save(weights, directory / "final.pt")
    decoder = open_checkpoint(directory).load().second_pass
    assert isinstance(decoder, NoDecoder)
    assert f"values of '{name}' are not finite" in decoder.reason
