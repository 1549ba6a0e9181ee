"""The Zipformer as a compiled graph: icefall's frames in any company, by few nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oasr_backend.compiled import GraphFiles, SessionEncoder, compiled_encoder
from oasr_backend.compiled.session import open_session
from oasr_backend.compiled.state_outputs import told_rolled
from oasr_backend.models import ChunkSettings
from tests.zipformer_helpers import (
    ZipformerStreams,
    feats,
    golden_config,
    golden_encoder,
    golden_expected,
    streamed,
    windows_of,
)

GOLDEN_TOLERANCE, TOLERANCE = 1e-4, 1e-5
CHUNKS = ChunkSettings(16, 4)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(name="session", scope="module")
def _session(folder: Path) -> SessionEncoder:
    encoder = golden_encoder("zip_ctc_small", CHUNKS)
    found = compiled_encoder(
        encoder,
        choice="onnx",
        chunk_frames=encoder.spec.chunk_frames,
        window_frames=2 * CHUNKS.chunk_size + 13,
        num_features=80,
        files=GraphFiles(folder),
    )
    assert isinstance(found, SessionEncoder)
    return found


def test_the_graphs_frames_are_icefalls(session: SessionEncoder) -> None:
    expected = golden_expected("zip_ctc_small")
    found_TD = streamed(session, expected["feats"], CHUNKS.chunk_size)
    np.testing.assert_allclose(found_TD, expected["c16_l4.enc"], rtol=0, atol=GOLDEN_TOLERANCE)


def test_the_graph_serves_any_rows_as_pytorch_does(session: SessionEncoder) -> None:
    """More rows than one run takes, each stream a step behind the one before it."""
    encoder, many = golden_encoder("zip_ctc_small", CHUNKS), 18
    windows = list(windows_of(feats(100), CHUNKS.chunk_size))
    both = [ZipformerStreams(session, many), ZipformerStreams(encoder, many)]
    for step in range(many):
        for streams in both:
            streams.open(step)
        slots = list(range(max(0, step - len(windows) + 1), step + 1))
        given_to = [windows[step - slot] for slot in slots]
        found, expected = (streams.step(slots, given_to) for streams in both)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    wide = list(range(many))
    found, expected = (streams.step(wide, windows[:1] * many) for streams in both)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_the_graph_is_lean(folder: Path, session: SessionEncoder) -> None:
    """A node costs about as much as a small sum: what a layer takes must not creep up."""
    assert session.spec.chunk_frames == 8
    onnx = pytest.importorskip("onnx")
    (path,) = folder.rglob("*.onnx")
    operators = [node.op_type for node in onnx.load(path).graph.node]
    config = golden_config("zip_ctc_small")
    num_layers = sum(stack.num_layers for stack in config.stacks)
    assert "If" not in operators
    assert operators.count("Gemm") == 17 * num_layers + 1
    assert operators.count("Shape") == 0
    assert len(operators) < 200 * num_layers + 50 * len(config.stacks)


def test_the_graph_gives_the_newest_frames_of_windows_and_reads_them_where_they_lie(
    folder: Path, session: SessionEncoder
) -> None:
    """As a kept graph tells without its encoder."""
    (path,) = folder.rglob("*.onnx")
    opened = open_session(path)
    read, rolled = {tensor.name for tensor in opened.get_inputs()}, told_rolled(opened)
    config = golden_config("zip_ctc_small")
    for state in session.spec.state_specs:
        _, _, number = state.name.partition("_")
        frames = CHUNKS.chunk_size // config.stacks[int(number)].downsampling if number else 0
        assert rolled.get(state.name) == ((2, frames) if 0 < frames < state.shape[1] else None)
        if number:
            layers = range(state.shape[0])
            assert {f"layer_{layer}_of_state_{state.name}" for layer in layers} <= read
            assert f"state_{state.name}" not in read, "all slots, where a layer's are enough"
