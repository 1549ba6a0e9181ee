"""A model that is called ready has decoded something, and shows no trace of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.decoders.base import (
    CTC_SEARCHES,
    ChunkRows,
    Finish,
    SearchKind,
    SearchSettings,
)
from oasr_backend.decoders.greedy import GreedySearch
from oasr_backend.errors import SelfTestError
from oasr_backend.serve.checks import Problem
from oasr_backend.serve.command import ServerSettings
from oasr_backend.serve.embedded import find_triton
from oasr_backend.serve.trial import try_loads
from oasr_backend.streaming.assemble import assemble, load_engine, try_out
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import ChunkResult, Hypothesis
from tests.checkpoint_helpers import SOURCE, copy_golden, edit_features, edit_weights
from tests.conftest import MODEL_REPOSITORY
from tests.decoder_checkpoint import write_checkpoint
from tests.engine_helpers import ask_one, assert_all_is_free, fault_at, golden_engine, noise

#: The value is finite, and its sum is beyond every type.
HUGE = 3e38


@pytest.fixture(name="overflowing")
def _overflowing(tmp_path: Path) -> Path:
    """A directory whose every file is in order and whose outputs are infinite."""
    directory = copy_golden(tmp_path)
    edit_weights(directory, lambda w: w["ctc.ctc_lo.weight"].fill_(HUGE))
    return directory


def test_outputs_that_are_not_finite_refuse_the_load(overflowing: Path) -> None:
    with pytest.raises(SelfTestError) as caught:
        load_engine(overflowing, ServingConfig(), device="cpu")
    message = str(caught.value)
    assert " of 1536 outputs" in message
    assert "not finite under dtype=float32; take the checkpoint of an earlier step" in message


def test_weights_that_half_precision_cannot_hold_are_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    directory = copy_golden(tmp_path)
    edit_weights(directory, lambda w: w["ctc.ctc_lo.weight"].mul_(1e6))
    with pytest.raises(SelfTestError, match=r"dtype=float16; serve it with dtype=float32"):
        load_engine(directory, ServingConfig.of(dtype="float16"), device="cpu")
    load_engine(directory, ServingConfig(), device="cpu")


@pytest.mark.parametrize("part", ["filterbank", "ctc"])
def test_a_part_that_raises_refuses_the_load_and_leaves_nothing(part: str) -> None:
    engine = golden_engine()
    with (
        fault_at(engine, part, lambda _: ValueError("no such bin")),
        pytest.raises(SelfTestError, match=r"a test stream fails \(ValueError: no such bin\)"),
    ):
        try_out(engine)
    assert_all_is_free(engine)
    try_out(engine)


class Mute(GreedySearch):
    """Nothing that it hears makes a hypothesis."""

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        return super().hypotheses(row, nbest, skip=skip)[:0]


class Deaf(GreedySearch):
    def begin(self, frames_NTX: Tensor, chunk: ChunkRows) -> Finish:
        raise IndexError(f"no row {chunk.rows.tolist()} of {len(frames_NTX)}")


def _unmade(_: SearchSettings) -> Any:
    raise KeyError("lexicon")


@pytest.mark.parametrize("is_default", [True, False])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_unmade, r"under decoder='new' a test stream fails \(KeyError: 'lexicon'\)"),
        (lambda _: None, r"under decoder='new' .*the search 'new' is made as None"),
        (lambda settings: Deaf(settings.blank_id), r"\(IndexError: .*mend the search 'new'"),
        (lambda settings: Mute(settings.blank_id), r"the search 'new' gives .* no hypothesis"),
    ],
    ids=["raises", "none", "deaf", "mute"],
)
def test_a_search_that_no_stream_would_survive_refuses_the_load_by_name(
    make: Callable[[SearchSettings], Any], told: str, *, is_default: bool
) -> None:
    """Also one that streams must ask for."""
    new = {"new": SearchKind("new", make)}
    searches = {**new, **CTC_SEARCHES} if is_default else {**CTC_SEARCHES, **new}
    checkpoint = replace(open_checkpoint(SOURCE).load(), searches=searches)
    engine = assemble(checkpoint, ServingConfig(), device=torch.device("cpu"))
    with pytest.raises(SelfTestError, match=told):
        try_out(engine)
    assert_all_is_free(engine)
    assert engine.store.decoders.kinds == []


def answer(engine: Engine, **parameters: Any) -> tuple[str, dict[str, Any]]:
    result: ChunkResult = ask_one(
        engine, "first", noise(5), flags="SE", parameters=parameters, wants_result=True
    )
    assert result.error is None
    return result.text, {**(result.document or {}), "step_ms": 0}


@pytest.mark.parametrize(
    "parameters",
    [{"word_times": True}, {"decoder": "prefix_beam", "nbest": 4, "rescoring": True}],
)
def test_streams_do_not_notice_it(tmp_path: Path, parameters: dict[str, Any]) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint")
    tested = load_engine(directory, ServingConfig(), device="cpu")
    assert_all_is_free(tested)
    assert tested.store.decoders.kinds == []
    once = answer(tested, **parameters)
    for _ in range(3):
        try_out(tested)
    assert_all_is_free(tested)
    assert answer(tested, **parameters) == once


def test_metrics_and_log_do_not_know_of_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = golden_engine(log_level="info")
    before = engine.readings()
    with caplog.at_level("INFO", "oasr_backend"):
        try_out(engine)
    assert engine.readings() == before
    assert caplog.messages == []


@pytest.mark.parametrize(
    "settings",
    [
        {"max_streams": 1},
        {"decoder": "prefix_beam", "rescoring": True, "nbest": 3, "word_times": True},
        {"num_left_chunks": -1, "max_blocks_per_seq": 1},
        {"num_left_chunks": 0, "chunk_size": 1},
        {"tail_padding": False, "sample_rate": 8000, "endpoint": True},
        {"dtype": "bfloat16", "partials": "off"},
    ],
    ids=str,
)
def test_it_follows_the_servers_own_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint")
    engine = load_engine(directory, ServingConfig.of(**settings), device="cpu")
    assert_all_is_free(engine)
    assert answer(engine)[1]["is_final"]


def check_only(directory: Path) -> list[Problem]:
    """What `oasr-serve --check-only` finds when it loads the shipped model with this checkpoint."""
    overrides = {"checkpoint_dir": str(directory), "device": "cpu", "max_streams": "4"}
    settings = ServerSettings(MODEL_REPOSITORY, overrides=overrides)
    return try_loads(find_triton(), settings).problems


def test_the_check_says_in_one_line_what_no_stream_would_survive(overflowing: Path) -> None:
    (problem,) = check_only(overflowing)
    assert "cannot be loaded: every file is read, but " in problem.message
    assert " of 1536 outputs of a test stream are not finite" in problem.message
    assert "\n" not in problem.message


def test_what_the_check_passes_serves(tmp_path: Path) -> None:
    directory = copy_golden(tmp_path)
    edit_features(directory, sample_rate=8000, frame_length=32, frame_shift=12.5)
    assert check_only(directory) == []
    assert answer(load_engine(directory, ServingConfig(), device="cpu"))[0]
