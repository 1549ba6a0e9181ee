"""The serving path against icefall's own streaming loop: golden checkpoints, all settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oasr_backend.errors import ConfigError, InvalidRequestError
from oasr_backend.parity import stream_log_probs, stream_tokens
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import Samples
from tests.engine_helpers import ask_one
from tests.same_results import TOLERANCE
from tests.zipformer_goldens import ZipGolden, zip_goldens

pytestmark = pytest.mark.numerics

#: Copies of a stream that are always at other places than each other.
DELAYS = (0, 1, 3)
WITH_TRANSDUCER = [name for name, golden in zip_goldens().items() if golden.has_transducer]


@pytest.fixture(name="golden", params=list(zip_goldens()))
def _golden(request: pytest.FixtureRequest) -> ZipGolden:
    return zip_goldens()[request.param]


def tokens_of(golden: ZipGolden, **more: Any) -> list[tuple[list[int], list[int], float]]:
    found = stream_tokens(
        golden.directory, golden.feats_TF, delays=DELAYS, **golden.settings, **more
    )
    assert len(found) == len(DELAYS)
    return found


def test_log_probs_are_icefalls(golden: ZipGolden) -> None:
    served_TV = stream_log_probs(golden.directory, golden.feats_TF, **golden.settings)
    num_frames = (len(golden.feats_TF) - 17) // 4 + 1
    assert served_TV.shape[0] == num_frames
    np.testing.assert_allclose(served_TV, golden["logp"][:num_frames], rtol=0, atol=TOLERANCE)


def test_greedy_tokens_are_icefalls_at_every_offset(golden: ZipGolden) -> None:
    for tokens, times, _ in tokens_of(golden, decoder="greedy"):
        assert tokens == golden["greedy"].tolist()
        assert times == sorted(times)
        assert times[-1] < len(golden["logp"])


@pytest.mark.parametrize("name", WITH_TRANSDUCER)
def test_the_transducers_greedy_tokens_and_their_frames_are_icefalls(name: str) -> None:
    golden = zip_goldens()[name]
    for tokens, times, _ in tokens_of(golden, decoder="transducer_greedy"):
        assert tokens == golden["rnnt_greedy"].tolist()
        assert times == golden["rnnt_greedy_frames"].tolist()


@pytest.mark.parametrize("name", WITH_TRANSDUCER)
def test_the_transducers_beam_and_its_score_are_icefalls(name: str) -> None:
    golden = zip_goldens()[name]
    for tokens, _, score in tokens_of(golden, decoder="transducer_beam", beam_size=4):
        assert tokens == golden["rnnt_beam"].tolist()
        assert score == pytest.approx(float(golden["rnnt_beam_score"]), abs=1e-3)


def test_without_the_official_end_a_stream_ends_behind_its_last_whole_frame() -> None:
    golden = zip_goldens()["zip_ctc_small-c16_l4"]
    whole, cut = (
        stream_tokens(
            golden.directory,
            golden.feats_TF,
            decoder="greedy",
            official_end=official_end,
            **golden.settings,
        )[0]
        for official_end in (True, False)
    )
    num_frames = (len(golden.feats_TF) - 17) // 4 + 1
    kept = [token for token, time in zip(*whole[:2], strict=True) if time < num_frames]
    assert cut[0] == kept


@pytest.mark.parametrize("name", ["lookahead", "language"])
def test_a_choice_that_the_family_has_not_is_refused(name: str) -> None:
    golden = zip_goldens()["zip_ctc_small-c16_l4"]
    with pytest.raises(InvalidRequestError, match=name):
        stream_tokens(golden.directory, golden.feats_TF, decoder="greedy", **{name: 1})


def engine_of(golden: ZipGolden, **settings: Any) -> Engine:
    return load_engine(golden.directory, golden.config(max_streams=4, **settings), device="cpu")


def pieces(samples_S: Samples, seed: int) -> list[Samples]:
    """Of any length from nothing to 0.7 s."""
    lengths = np.random.default_rng(seed).integers(0, 11_200, size=200)
    edges = np.cumsum(lengths)
    return np.split(samples_S, edges[edges < samples_S.size])


def test_audio_gives_icefalls_text_under_every_search(golden: ZipGolden) -> None:
    engine = engine_of(golden)
    for decoder, expected in golden.texts.items():
        parts = pieces(golden.audio(), seed=golden.chunk_size)
        for index, part in enumerate(parts):
            flags = ("S" if index == 0 else "") + ("E" if index == len(parts) - 1 else "")
            parameters = {"decoder": decoder} if index == 0 else None
            result = ask_one(engine, "a", part, flags=flags, parameters=parameters)
            assert result.error is None
        assert result.text == expected, decoder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chunk_size": 14}, "chunk_size=14"),
        ({"chunk_size": 7}, "chunk_size=7"),
        ({"num_left_chunks": 0}, "num_left_chunks=0"),
        ({"num_left_chunks": -1}, "num_left_chunks=-1"),
        ({"num_left_chunks": 100_000}, "the states of max_streams=256 streams need"),
        ({"blank_penalty": 1.0}, "blank_penalty=1"),
        ({"block_size_frames": 16}, "block_size_frames=16"),
    ],
)
def test_a_geometry_that_the_model_was_not_made_for_is_refused_by_name(
    settings: dict[str, Any], words: str
) -> None:
    golden = zip_goldens()["zip_ctc_small-c16_l4"]
    with pytest.raises(ConfigError, match=words):
        load_engine(golden.directory, golden.config().changed(**settings), device="cpu")
