"""The serving path against WeNet's own chunk loop: golden checkpoints, features in."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from oasr_backend import parity
from oasr_backend.compiled import SessionEncoder
from oasr_backend.config import ServingConfig
from oasr_backend.errors import InvalidRequestError
from oasr_backend.parity import decode_features, stream_log_probs, stream_transcript
from oasr_backend.streaming import assemble
from oasr_backend.streaming.engine import Engine
from tests.conftest import GOLDEN_DIR
from tests.same_results import TOLERANCE

pytestmark = pytest.mark.numerics

CHECKPOINTS = ("wenet_small", "wenet_bn_k31")


@dataclass(frozen=True)
class Golden:
    """WeNet's results for one checkpoint at one chunk size and left context."""

    directory: Path
    chunk_size: int
    num_left_chunks: int
    feats_TF: npt.NDArray[np.float32]
    log_probs_TV: npt.NDArray[np.float32]
    greedy: tuple[int, ...]
    beam: tuple[int, ...]
    beam_score: float

    @property
    def score_tolerance(self) -> float:
        """A score follows no frame's log-probs by more than they differ, so the sum is enough."""
        return len(self.log_probs_TV) * TOLERANCE

    @property
    def greedy_choices(self) -> set[tuple[int, ...]]:
        """WeNet's tokens, and others at a frame where its log-probs are too close to decide."""
        peaks_T1 = self.log_probs_TV.max(axis=1, keepdims=True)
        is_open_TV = self.log_probs_TV >= peaks_T1 - 2 * TOLERANCE
        paths = itertools.product(*(np.flatnonzero(is_open_V) for is_open_V in is_open_TV))
        return {tuple(int(unit) for unit, _ in itertools.groupby(p) if unit) for p in paths}

    @property
    def config(self) -> ServingConfig:
        return ServingConfig.of(chunk_size=self.chunk_size, num_left_chunks=self.num_left_chunks)


@cache
def goldens() -> dict[str, Golden]:
    found = {}
    for name in CHECKPOINTS:
        arrays = dict(np.load(GOLDEN_DIR / name / "expected.npz"))
        for key in sorted(key for key in arrays if key.startswith("c") and key.endswith(".logp")):
            setting = key.removesuffix(".logp")
            chunk, left = setting.split("_")
            found[f"{name}-{setting}"] = Golden(
                directory=GOLDEN_DIR / name,
                chunk_size=int(chunk[1:]),
                num_left_chunks=int(left[1:]),
                feats_TF=arrays["feats"],
                log_probs_TV=arrays[key],
                greedy=tuple(arrays[f"{setting}.greedy"].tolist()),
                beam=tuple(arrays[f"{setting}.beam"].tolist()),
                beam_score=float(arrays[f"{setting}.beam_score"]),
            )
    return found


@pytest.fixture(autouse=True)
def _served_by_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU serves by default; an encoder that fell back to PyTorch would prove nothing."""

    def assemble_compiled(*args: Any, **more: Any) -> Engine:
        engine = assemble.assemble(*args, **more)
        assert isinstance(engine.parts.model.encoder, SessionEncoder)
        return engine

    monkeypatch.setattr(parity, "assemble", assemble_compiled)


@pytest.fixture(params=sorted(goldens()))
def golden(request: pytest.FixtureRequest) -> Golden:
    return goldens()[request.param]


def test_every_setting_of_both_checkpoints_is_covered() -> None:
    assert len(goldens()) == 12


def test_one_frame_of_one_setting_alone_leaves_wenets_greedy_tokens_open() -> None:
    """Blank and a token have the same float32 log-prob there, so any rounding decides."""
    assert all(golden.greedy in golden.greedy_choices for golden in goldens().values())
    open_ones = {name: one for name, one in goldens().items() if len(one.greedy_choices) > 1}
    assert list(open_ones) == ["wenet_bn_k31-c16_l-1"]
    (golden,) = open_ones.values()
    ranked_TV = np.sort(golden.log_probs_TV, axis=1)
    assert np.count_nonzero(ranked_TV[:, -1] - ranked_TV[:, -2] <= 2 * TOLERANCE) == 1
    assert float((ranked_TV[:, -1] - ranked_TV[:, -2]).min()) == 0.0


def test_log_probs_equal_those_of_wenet(golden: Golden) -> None:
    log_probs_TV = stream_log_probs(
        golden.directory,
        golden.feats_TF,
        chunk_size=golden.chunk_size,
        num_left_chunks=golden.num_left_chunks,
    )
    np.testing.assert_allclose(log_probs_TV, golden.log_probs_TV, atol=TOLERANCE, rtol=0)


def test_log_probs_of_the_encoder_in_pytorch_equal_those_of_wenet(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests of this file see what a CPU serves; this is what the graph was made from."""
    monkeypatch.setattr(assemble, "compiled_encoder", lambda encoder, **_: encoder)
    monkeypatch.setattr(parity, "assemble", assemble.assemble)
    test_log_probs_equal_those_of_wenet(golden)


def test_greedy_tokens_equal_those_of_wenet(golden: Golden) -> None:
    (decoded,) = decode_features(golden.directory, [golden.feats_TF], golden.config)
    assert decoded.hypothesis.tokens in golden.greedy_choices


def test_prefix_beam_tokens_and_score_equal_those_of_wenet(golden: Golden) -> None:
    config = ServingConfig.of(
        chunk_size=golden.chunk_size,
        num_left_chunks=golden.num_left_chunks,
        decoder="prefix_beam",
    )
    (decoded,) = decode_features(golden.directory, [golden.feats_TF], config)
    assert decoded.hypothesis.tokens == golden.beam
    assert decoded.hypothesis.score == pytest.approx(golden.beam_score, abs=golden.score_tolerance)


@pytest.mark.parametrize("block_chunks", [1, 2, 3])
def test_sixteen_interleaved_copies_of_any_length_and_phase_each_equal_wenet(
    golden: Golden, block_chunks: int
) -> None:
    generator = np.random.default_rng(golden.chunk_size)
    total = len(golden.feats_TF)
    # A prefix is exact up to its last full chunk: the frames after it see a shorter chunk.
    lengths = [total, *generator.integers(total // 3, total, size=15).tolist()]
    config = ServingConfig.of(
        chunk_size=golden.chunk_size,
        num_left_chunks=golden.num_left_chunks,
        block_size_frames=block_chunks * golden.chunk_size,
    )
    decoded = decode_features(
        golden.directory,
        [golden.feats_TF[:length] for length in lengths],
        config,
        delays=generator.integers(0, 6, size=16).tolist(),
    )
    assert decoded[0].hypothesis.tokens in golden.greedy_choices
    for stream in decoded:
        full = len(stream.log_probs_TV)
        if stream is not decoded[0]:
            full = full // golden.chunk_size * golden.chunk_size
        np.testing.assert_allclose(
            stream.log_probs_TV[:full], golden.log_probs_TV[:full], atol=TOLERANCE, rtol=0
        )


DIRECTORY = GOLDEN_DIR / "wenet_small"


@pytest.mark.parametrize("shape", [(100, 79), (100, 81), (6, 80), (0, 80), (100,), (1, 100, 80)])
def test_features_that_no_window_can_hold_are_refused_with_both_shapes(
    shape: tuple[int, ...],
) -> None:
    feats = np.zeros(shape, dtype=np.float32)
    with pytest.raises(InvalidRequestError) as caught:
        stream_log_probs(DIRECTORY, feats, chunk_size=16, num_left_chunks=4)
    assert (
        f"features of shape {shape}, but the checkpoint reads (T, 80) with T of 7 or more"
        in str(caught.value)
    )


def test_the_fewest_features_give_one_frame() -> None:
    feats_TF = np.zeros((7, 80), dtype=np.float32)
    log_probs_TV = stream_log_probs(DIRECTORY, feats_TF, chunk_size=16, num_left_chunks=4)
    assert len(log_probs_TV) == 1


def test_a_file_of_two_channels_is_refused_with_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.zeros((1600, 2), dtype=np.float32), 16000)
    with pytest.raises(
        InvalidRequestError, match=r"samples of shape \(1600, 2\).*mix the channels"
    ):
        stream_transcript(DIRECTORY, path, chunk_size=16, num_left_chunks=4)
