"""The compiled encoder against WeNet's own chunk loop, through the serving path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasr_backend import parity
from oasr_backend.compiled import GraphFiles, SessionEncoder, compiled_encoder
from oasr_backend.config import ServingConfig
from oasr_backend.parity import decode_features
from oasr_backend.streaming.assemble import assemble
from oasr_backend.streaming.engine import Engine
from tests.same_results import TOLERANCE
from tests.test_parity import Golden, goldens

pytestmark = pytest.mark.numerics


@pytest.fixture(params=sorted(goldens()))
def golden(request: pytest.FixtureRequest) -> Golden:
    return goldens()[request.param]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Engines of parity serve a compiled encoder."""

    def assemble_compiled(*args: Any, **kwargs: Any) -> Engine:
        engine = assemble(*args, **kwargs)
        model, frames = engine.parts.model, engine.parts.geometry
        if not isinstance(model.encoder, SessionEncoder):
            model.encoder = compiled_encoder(
                model.encoder,
                choice="onnx",
                chunk_frames=frames.stride_frames // frames.subsampling,
                window_frames=frames.window_frames,
                num_features=frames.frames.num_bins,
                files=GraphFiles(folder),
            )
        assert isinstance(model.encoder, SessionEncoder)
        return engine

    monkeypatch.setattr(parity, "assemble", assemble_compiled)


def test_log_probs_and_tokens_equal_those_of_wenet(golden: Golden) -> None:
    (decoded,) = decode_features(golden.directory, [golden.feats_TF], golden.config)
    np.testing.assert_allclose(decoded.log_probs_TV, golden.log_probs_TV, atol=TOLERANCE, rtol=0)
    assert decoded.hypothesis.tokens in golden.greedy_choices


def test_prefix_beam_tokens_and_score_equal_those_of_wenet(golden: Golden) -> None:
    config = golden.config.changed(decoder="prefix_beam")
    (decoded,) = decode_features(golden.directory, [golden.feats_TF], config)
    assert decoded.hypothesis.tokens == golden.beam
    assert decoded.hypothesis.score == pytest.approx(golden.beam_score, abs=golden.score_tolerance)


@pytest.mark.parametrize("block_chunks", [1, 3])
def test_sixteen_interleaved_copies_of_any_length_and_phase_each_equal_wenet(
    golden: Golden, block_chunks: int
) -> None:
    generator = np.random.default_rng(golden.chunk_size)
    total = len(golden.feats_TF)
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
        # A prefix is exact up to its last full chunk: the frames after it see a shorter chunk.
        full = len(stream.log_probs_TV)
        if stream is not decoded[0]:
            full = full // golden.chunk_size * golden.chunk_size
        np.testing.assert_allclose(
            stream.log_probs_TV[:full], golden.log_probs_TV[:full], atol=TOLERANCE, rtol=0
        )
