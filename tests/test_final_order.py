"""The last order of a beam: where its texts end, then what the attention decoder makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from tests.decoder_checkpoint import write_checkpoint
from tests.engine_helpers import ask, ask_one, assert_all_is_free, chunk, golden_engine, noise
from tests.ngrams import arpa, write
from tests.result_schema import check_document


@pytest.fixture(scope="module", name="lm_engine")
def _lm_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model whose texts end behind some units rather than behind others, and a decoder."""
    directory = write_checkpoint(tmp_path_factory.mktemp("bi") / "checkpoint")
    tokenizer = open_checkpoint(directory).load().tokenizer
    symbols = tokenizer.pieces(range(2, tokenizer.vocab_size))
    chance = np.random.default_rng(3)
    entries = {(symbol,): (-1.0, -0.5) for symbol in ("<unk>", "</s>", "<s>", *symbols)}
    for symbol in symbols:
        entries[symbol, "</s>"] = (-float(chance.uniform(0, 9)), 0.0)
    path = write(tmp_path_factory.mktemp("lm"), arpa(entries))
    config = ServingConfig.of(lm_path=str(path), lm_weight=0.3, tail_padding=False, max_streams=8)
    return load_engine(directory, config, device="cpu")


WITH_LM = {"decoder": "prefix_beam", "use_lm": True, "nbest": 10}


def test_the_end_of_a_text_is_weighed_once_the_stream_ends(lm_engine: Engine) -> None:
    scorer = lm_engine.store.decoders._final_order._language_model
    assert scorer is not None
    changes = 0
    for seed in range(4):
        begun = chunk("a", noise(seed), flags="S", parameters=WITH_LM, wants_result=True)
        (partial,) = ask(lm_engine, begun)
        (stream,) = lm_engine.streams
        beam = lm_engine.store.decoders.nbest(stream.slot, 10)
        assert check_document(partial.document)["nbest"][0]["tokens"] == list(beam[0].tokens)
        final = check_document(ask_one(lm_engine, "a", flags="E", wants_result=True).document)
        gains = [scorer.ended([[one._replace(score=0.0)]])[0][0].score for one in beam]
        expected = sorted(
            zip(beam, gains, strict=True), key=lambda pair: -(pair[0].score + pair[1])
        )
        assert [one["tokens"] for one in final["nbest"]] == [list(h.tokens) for h, _ in expected]
        assert [one["score"] for one in final["nbest"]] == pytest.approx(
            [hypothesis.score + gain for hypothesis, gain in expected]
        )
        assert final["text"] == final["nbest"][0]["text"]
        assert "rescored" not in final
        changes += expected[0][0] != beam[0]
    assert changes, "no end changed an order: this test shows nothing"
    assert_all_is_free(lm_engine)


def test_where_the_audio_is_cut_changes_no_end(lm_engine: Engine) -> None:
    samples_S, piece = noise(1, seconds=3), 7_001
    for start in range(0, samples_S.size, piece):
        last = start + piece >= samples_S.size
        flags = ("S" if start == 0 else "") + ("E" if last else "")
        parameters = WITH_LM if start == 0 else {}
        cut = ask_one(
            lm_engine, "a", samples_S[start : start + piece],
            flags=flags, parameters=parameters, wants_result=True,
        ).document  # fmt: skip
    whole = ask_one(
        lm_engine, "a", samples_S, flags="SE", parameters=WITH_LM, wants_result=True
    ).document
    assert cut is not None
    assert whole is not None
    assert cut["text"] == whole["text"]
    for one, other in zip(cut["nbest"], whole["nbest"], strict=True):
        assert (one["text"], one["tokens"]) == (other["text"], other["tokens"])
        assert one["score"] == pytest.approx(other["score"], abs=1e-3)


def test_a_stream_without_the_model_never_hears_of_it(lm_engine: Engine) -> None:
    options = {**WITH_LM, "use_lm": False}
    beside = ask(
        lm_engine,
        chunk(0, noise(0), flags="SE", parameters=options, wants_result=True),
        chunk(1, noise(1), flags="SE", parameters=WITH_LM, wants_result=True),
    )[0]
    plain = ask_one(
        golden_engine(tail_padding=False), 0, noise(0), flags="SE",
        parameters=options, wants_result=True,
    )  # fmt: skip
    assert beside.document is not None
    assert plain.document is not None
    assert [one["tokens"] for one in beside.document["nbest"]] == [
        one["tokens"] for one in plain.document["nbest"]
    ]


def scores_of(engine: Engine, **options: Any) -> dict[tuple[int, ...], float]:
    """The score of each hypothesis, by its tokens."""
    parameters = {**WITH_LM, **options}
    result = ask_one(engine, "a", noise(2), flags="SE", parameters=parameters, wants_result=True)
    document = check_document(result.document)
    assert document.get("rescored", False) == options.get("rescoring", False)
    return {tuple(one["tokens"]): one["score"] for one in document["nbest"]}


def test_rescoring_goes_on_from_the_order_with_the_ends(lm_engine: Engine) -> None:
    """What the attention decoder adds to half of a beam's score is the same with and without."""
    ctc_weight = lm_engine.config.search.rescoring_ctc_weight
    added = []
    for use_lm in (True, False):
        beam = scores_of(lm_engine, use_lm=use_lm)
        rescored = scores_of(lm_engine, use_lm=use_lm, rescoring=True)
        assert rescored.keys() == beam.keys()
        added.append({one: rescored[one] - ctc_weight * beam[one] for one in beam})
    both = added[0].keys() & added[1].keys()
    assert both
    for tokens in both:
        assert added[0][tokens] == pytest.approx(added[1][tokens], abs=1e-3)
