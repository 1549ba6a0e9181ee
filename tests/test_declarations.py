"""What a family declares is checked when it is made, and refused with field, limit and remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oasr_backend.cache import StreamStateSpec
from oasr_backend.checkpoints import Checkpoint, CheckpointInfo
from oasr_backend.config import ServingConfig
from oasr_backend.decoders.base import CTC_SEARCHES, SearchKind
from oasr_backend.errors import CheckpointError, ConfigError, SelfTestError
from oasr_backend.features import FrameGeometry, KaldiFrontend, LogMelFilterbank
from oasr_backend.models import (
    AcousticModel,
    ChunkSettings,
    CtcHead,
    EncoderCaches,
    EncoderSpec,
    StreamingEncoder,
)
from oasr_backend.streaming.assemble import assemble, try_out
from oasr_backend.text.tokenizer import UnitTokenizer

SPEC = EncoderSpec(model_dim=8, subsampling_rate=4, right_context_frames=3)
FRAMES = FrameGeometry(8000, frame_length_samples=160, frame_shift_samples=80, num_bins=8)
SYMBOLS = ("<blank>", "a", "b")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_dim": 0}, "model_dim=0 is below 1; give 1 or more"),
        ({"model_dim": 8.0}, "model_dim=8.0 is no whole number; give an int of 1 or more"),
        ({"subsampling_rate": 0}, "subsampling_rate=0 is below 1"),
        ({"subsampling_rate": True}, "subsampling_rate=True is no whole number"),
        ({"right_context_frames": -1}, "right_context_frames=-1 is below 0"),
        (
            {"right_context_frames": 2},
            "right_context_frames=2 is below 3, so that windows of subsampling_rate=4 would skip "
            "frames; give 3 or more",
        ),
        ({"chunk_sizes": (8, 0)}, "chunk_sizes=0 is below 1"),
        ({"chunk_sizes": ("8",)}, "chunk_sizes='8' is no whole number"),
        (
            {"state_specs": (StreamStateSpec("sum", (3,)), StreamStateSpec("sum", (4,)))},
            "state_specs are named ['sum', 'sum']; give each a name of its own",
        ),
        ({"state_specs": (StreamStateSpec("", (3,)),)}, "state_specs are named ['']"),
    ],
)
def test_an_encoders_spec_is_refused_by_the_field(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(SPEC, **change)
    assert f"the encoder's spec: {told}" in str(caught.value)


@pytest.mark.parametrize("rate", [1, 2, 3, 4, 8])
def test_the_least_right_context_is_what_windows_need(rate: int) -> None:
    spec = EncoderSpec(model_dim=8, subsampling_rate=rate, right_context_frames=rate - 1)
    model = AcousticModel(KaldiFrontend(LogMelFilterbank()), Crooked(spec), [ctc_head()])
    for chunk_size in (1, 5):
        model.set_chunks(ChunkSettings(chunk_size, num_left_chunks=0))
        geometry = model.window_geometry()
        assert spec.num_encoder_frames(geometry.window_frames) == chunk_size


@pytest.mark.parametrize(
    "name", ["sample_rate", "frame_length_samples", "frame_shift_samples", "num_bins"]
)
def test_a_front_ends_geometry_is_whole_numbers(name: str) -> None:
    for value, told in ((1.5, "=1.5 is no whole number"), (0, "=0 is below 1")):
        with pytest.raises(ConfigError, match=f"the front end's geometry: {name}{told}"):
            replace(FRAMES, **{name: value})


def test_a_search_honours_options_of_searches_only() -> None:
    with pytest.raises(ConfigError, match=r"'x' honours 'beamsize', .* of beam_size, nbest, "):
        SearchKind("x", CTC_SEARCHES["greedy"].make, honours=frozenset({"nbest", "beamsize"}))
    with pytest.raises(ConfigError, match="a search has the name ''"):
        SearchKind("", CTC_SEARCHES["greedy"].make)


class Crooked(StreamingEncoder):
    """Gives what it is told, whatever its spec says."""

    def __init__(self, spec: EncoderSpec, *, given: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._spec, self._given = spec, given

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    def forward_chunk(
        self,
        features_BWF: Tensor,
        caches: EncoderCaches,  # noqa: ARG002
    ) -> Any:
        return self._given and torch.zeros(features_BWF.shape[0], *self._given)


def ctc_head(width: int = 8, *, blank_id: int = 0) -> CtcHead:
    return CtcHead(width, len(SYMBOLS), blank_id=blank_id)


def checkpoint(
    head: CtcHead | None = None, *, given: tuple[int, int] | None = None, **fields: Any
) -> Checkpoint:
    model = AcousticModel(
        KaldiFrontend(LogMelFilterbank()), Crooked(SPEC, given=given), [head or ctc_head()]
    )
    return Checkpoint(model, UnitTokenizer(SYMBOLS), **{"searches": CTC_SEARCHES, **fields})


@pytest.mark.parametrize(
    ("searches", "told"),
    [
        ({}, "searches={}; give one SearchKind or more"),
        (["greedy"], "searches=['greedy']; give one SearchKind or more"),
        ({"best": CTC_SEARCHES["greedy"]}, "has 'greedy' under the name 'best'"),
        ({"greedy": None}, "the search 'greedy' is None; give a SearchKind"),
    ],
    ids=["none", "list", "misnamed", "no kind"],
)
def test_searches_are_refused_before_and_with_the_weights(searches: Any, told: str) -> None:
    for make in (
        lambda: CheckpointInfo(SPEC, FRAMES, searches, None),
        lambda: checkpoint(searches=searches),
    ):
        with pytest.raises(CheckpointError) as caught:
            make()
        assert told in str(caught.value)


@pytest.mark.parametrize("blank_id", [-1, 3])
def test_a_blank_outside_the_heads_outputs_is_refused(blank_id: int) -> None:
    with pytest.raises(CheckpointError, match=rf"the checkpoint has blank_id={blank_id}, "):
        checkpoint(blank_id=blank_id)
    with pytest.raises(CheckpointError, match=rf"the CTC head has blank_id={blank_id}, "):
        checkpoint(ctc_head(blank_id=blank_id))
    assert checkpoint(blank_id=2).blank_id == 2


def test_a_head_of_another_width_than_the_encoder_is_refused() -> None:
    told = "the CTC head takes frames of width 9, but the encoder declares model_dim=8"
    with pytest.raises(CheckpointError, match=told):
        checkpoint(ctc_head(9))


@pytest.mark.parametrize(
    ("given", "told"),
    [((15, 8), "gave (1, 15, 8)"), ((16, 9), "gave (1, 16, 9)"), (None, "gave None")],
    ids=str,
)
def test_frames_of_another_shape_than_declared_are_told_with_both_shapes(
    given: tuple[int, int] | None, told: str
) -> None:
    engine = assemble(checkpoint(given=given), ServingConfig(), device=torch.device("cpu"))
    with pytest.raises(SelfTestError) as caught:
        try_out(engine)
    message = str(caught.value)
    assert f"forward_chunk of Crooked {told} for 64 feature frames" in message
    assert "(rows, frames, model_dim) = (1, 16, 8); mend forward_chunk or the spec" in message
    assert "of one training" not in message


def test_frames_of_the_declared_shape_pass() -> None:
    engine = assemble(checkpoint(given=(16, 8)), ServingConfig(), device=torch.device("cpu"))
    try_out(engine)
