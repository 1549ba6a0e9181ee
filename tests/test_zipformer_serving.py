"""Streams of a Zipformer among each other: who comes and goes changes no text."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.config import ServingConfig
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import Samples
from tests.churn import Churn
from tests.conftest import GOLDEN_DIR
from tests.engine_helpers import ask, ask_one, chunk, noise
from tests.reference.poison import NAN
from tests.zipformer_goldens import zip_goldens

pytestmark = pytest.mark.numerics

CHECKPOINT = GOLDEN_DIR / "zip_rnnt_small"
SEARCHES = ("transducer_greedy", "transducer_beam", "greedy", "prefix_beam")
#: With chunk 16: samples of a window, and of the way from one to the next.
WINDOW_SAMPLES, STRIDE_SAMPLES = 7320, 5120


def make_engine(**more: Any) -> Engine:
    config = ServingConfig.of(**{"chunk_size": 16, "num_left_chunks": 4, "max_streams": 6, **more})
    return load_engine(CHECKPOINT, config, device="cpu")


@cache
def shared_engine() -> Engine:
    return make_engine()


def document(engine: Engine, samples_S: Samples, **parameters: Any) -> dict[str, Any]:
    result = ask_one(engine, "one", samples_S, flags="SE", parameters=parameters, wants_result=True)
    assert result.error is None
    return dict(result.document or {})


@cache
def text_alone(seed: int, decoder: str) -> str:
    engine = make_engine(max_streams=1)
    return str(document(engine, recording(seed), decoder=decoder)["text"])


def recording(seed: int) -> Samples:
    """Speech and noise, 0.1 to 2 s long."""
    speech_S = zip_goldens()["zip_rnnt_small-c16_l4"].audio()
    chance = np.random.default_rng(seed)
    begin = int(chance.integers(0, speech_S.size - 16_000))
    length = int(chance.integers(1_600, 32_000))
    return np.concatenate((noise(seed, seconds=0.3), speech_S[begin : begin + length]))


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from(SEARCHES), st.integers(0, 4)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
)
def test_random_joins_and_leaves_give_each_stream_what_it_has_alone(
    visits: list[tuple[int, str, int]], seed: int
) -> None:
    """Streams join after some rounds and send pieces of any length; one may be cut off."""
    engine, chance = shared_engine(), random.Random(seed)
    left = {i: list(recording(seed)) for i, (seed, _, _) in enumerate(visits)}
    wait = {i: visit[2] for i, visit in enumerate(visits)}
    started: set[int] = set()
    while left:
        requests = []
        for i in sorted(left):
            if wait[i]:
                wait[i] -= 1
                continue
            count = chance.randrange(0, 12_000)
            part, left[i] = left[i][:count], left[i][count:]
            flags = ("" if i in started else "S") + ("" if left[i] else "E")
            parameters = {"decoder": visits[i][1]} if "S" in flags else None
            started.add(i)
            samples_S = np.array(part, dtype=np.float32)
            requests.append((i, chunk(i, samples_S, flags=flags, parameters=parameters)))
        results = ask(engine, *(request for _, request in requests))
        for (i, request), result in zip(requests, results, strict=True):
            assert result.error is None
            if request.is_last:
                assert result.text == text_alone(*visits[i][:2])
                del left[i]


def test_hundreds_of_random_visits_change_no_text() -> None:
    recordings = [recording(seed) for seed in range(6)]
    texts = [text_alone(seed, "transducer_greedy") for seed in range(6)]
    churn = Churn(shared_engine(), recordings, texts, seed=5, most_guests=5)
    churn.run(num_joins=120)
    assert churn.num_finished > 60
    assert not churn.wrong


def test_what_an_earlier_stream_left_reaches_no_later_one() -> None:
    engine = make_engine()
    states = engine.store.states

    def poison(slot: int) -> None:
        for spec in states.specs.values():
            if spec.dtype is None:
                states.buffer_of(spec.name).select(spec.slot_axis, slot).fill_(NAN)
            else:
                states.buffer_of(spec.name).select(spec.slot_axis, slot).fill_(7)

    states._before_reuse = poison  # type: ignore[method-assign]
    for seed in (1, 2, 3):
        for decoder in SEARCHES:
            assert document(engine, recording(seed), decoder=decoder)["text"] == text_alone(
                seed, decoder
            )
    assert not engine.store.slots.capacity - engine.store.slots.num_free_slots


def test_a_reset_slot_hears_what_a_fresh_one_hears() -> None:
    """All of a stream's state goes, the processed frames and the predictor's context too."""
    engine = make_engine()
    slot = engine.store.open(engine.parts.admission.defaults)
    states = engine.store.states
    for spec in states.specs.values():
        states.buffer_of(spec.name).select(spec.slot_axis, slot).fill_(3)
    states.reset(slot)
    assert not any(states.row_of(name, slot).any() for name in states.specs)
    assert {"processed", "embed"} <= set(states.specs)


def test_the_first_text_can_come_when_the_first_window_is_heard_and_no_later() -> None:
    engine = make_engine()
    speech_S = zip_goldens()["zip_rnnt_small-c16_l4"].audio()
    ask_one(engine, "a", speech_S[: WINDOW_SAMPLES - 1], flags="S")
    (stream,) = engine.parts.streams
    assert stream.num_encoder_frames == 0
    ask_one(engine, "a", speech_S[WINDOW_SAMPLES - 1 : WINDOW_SAMPLES])
    assert stream.num_encoder_frames == 8
    ask_one(engine, "a", speech_S[WINDOW_SAMPLES : WINDOW_SAMPLES + STRIDE_SAMPLES - 1])
    assert stream.num_encoder_frames == 8
    ask_one(engine, "a", speech_S[-1:])
    assert stream.num_encoder_frames == 16


def test_a_token_frame_lasts_40_ms() -> None:
    assert shared_engine().parts.geometry.encoder_frame_s == 0.04
    told = document(shared_engine(), recording(1), word_times=True)
    assert told["tokens"], "nothing is heard"
    assert all(round(token["start_s"] / 0.04, 6).is_integer() for token in told["tokens"])


@pytest.mark.parametrize("decoder", SEARCHES)
def test_integers_and_floats_of_the_same_audio_give_the_same_text(decoder: str) -> None:
    codes_S = (recording(4) * 32767).astype(np.int16)
    floats_S = codes_S.astype(np.float32) / np.float32(32768)
    texts = [document(shared_engine(), x_S, decoder=decoder)["text"] for x_S in (codes_S, floats_S)]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("num_samples", [0, 1, 79, 80, 119, 120, 240, 399, 400, 2000])
def test_streams_shorter_than_a_window_end_with_a_text(num_samples: int) -> None:
    told = document(shared_engine(), recording(1)[:num_samples])
    assert told["is_final"]
    # 43 frames of padding follow the last of at least one real frame.
    num_frames = (num_samples + 80) // 160
    assert told["num_frames"] == (8 * -(-(num_frames + 43) // 32) if num_frames else 0)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"decoder": "transducer_greedy", "nbest": 2}, "nbest=2"),
        ({"decoder": "transducer_greedy", "hotwords": "the"}, "hotwords"),
        ({"decoder": "transducer_greedy", "use_lm": True}, "use_lm"),
        ({"decoder": "transducer_beam", "rescoring": True}, "rescoring"),
        ({"decoder": "transducer_beam", "nbest": 5}, "nbest=5"),
        ({"decoder": "attention"}, "decoder='attention'"),
    ],
)
def test_what_a_search_cannot_honour_is_refused_by_name(
    parameters: dict[str, Any], words: str
) -> None:
    result = ask_one(shared_engine(), "r", flags="SE", parameters=parameters)
    assert result.error is not None
    assert words in str(result.error)


def test_a_beam_keeps_as_many_paths_as_asked_and_four_by_itself() -> None:
    told = document(shared_engine(), recording(2), decoder="transducer_beam", nbest=4)
    assert 1 < len(told["nbest"]) <= 4
    told = document(shared_engine(), recording(2), decoder="transducer_beam", nbest=9, beam_size=9)
    assert 4 < len(told["nbest"]) <= 9


def test_hotwords_move_the_beam_of_the_transducer() -> None:
    parameters = {"decoder": "transducer_beam", "hotwords": "FOR THAT", "hotword_boost": 6.0}
    plain = document(shared_engine(), recording(2), decoder="transducer_beam")["text"]
    moved = document(shared_engine(), recording(2), **parameters)["text"]
    assert moved != plain
    assert moved.count("FOR THAT") + moved.count("FORTHAT") > plain.count("FOR THAT")
