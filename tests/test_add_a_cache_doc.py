"""The code of docs/add_a_cache.md runs, and does what the text around it says."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from oasr_backend.checkpoints import Checkpoint, open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.errors import StreamLimitError
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.store import StreamPart
from oasr_backend.types import Samples
from tests.conftest import GOLDEN_DIR, ROOT
from tests.doc_blocks import run_document
from tests.engine_helpers import ask, ask_one, assert_all_is_free, chunk, error_of, noise

DOCUMENT = ROOT / "docs" / "add_a_cache.md"


@pytest.fixture(scope="module", name="names")
def _names() -> dict[str, Any]:
    return run_document(DOCUMENT.name)


def test_declared_states_have_the_printed_shapes(names: dict[str, Any]) -> None:
    states = names["states"]
    assert states.buffer_of("average").shape == (2, names["MAX_STREAMS"] + 1, 8)
    assert states.buffer_of("prompt").shape == (names["MAX_STREAMS"] + 1, 3)


def test_a_step_writes_each_row_to_its_stream_and_padding_to_the_lane(
    names: dict[str, Any],
) -> None:
    assert not names["old_LBD"].any(), "zero is the initial value"
    assert names["new_LBD"][0, :, 0].tolist() == [1.0, 2.0, 99.0]
    buffer = names["states"].buffer_of("average")
    assert (buffer[:, names["states"].pad_slot] == 99.0).all()


def test_a_reset_keeps_the_persistent_state_alone(names: dict[str, Any]) -> None:
    states = names["states"]
    assert not states.row_of("average", names["two"]).any()
    assert (states.row_of("prompt", names["two"]) == 7.0).all()


def test_the_slot_of_a_freed_stream_comes_zeroed_to_the_next(names: dict[str, Any]) -> None:
    states, slots = names["states"], names["slots"]
    taken = [slots.allocate() for _ in range(names["MAX_STREAMS"] - 1)]
    assert names["one"] in taken
    for slot in taken:
        states.open(slot)
        assert not states.row_of("average", slot).any()
        states.close(slot)
        slots.free(slot)


def test_two_caches_of_a_stream_share_its_slot(names: dict[str, Any]) -> None:
    assert names["slots"].num_free_slots == names["MAX_STREAMS"] - 1
    assert len(names["history"].blocks_of(names["two"])) == 2


def test_the_growing_cache_shows_two_chunks_and_the_new_one(names: dict[str, Any]) -> None:
    assert names["seen"] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert torch.equal(names["v_BKHD"], -names["k_BKHD"])
    pool = names["history"].pool
    held = pool.num_blocks - pool.num_free_blocks
    assert held == names["config"].num_left_chunks


def test_the_moments_are_all_that_a_part_has_to_answer(names: dict[str, Any]) -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("\n## Put it into service\n")[2]
    rows = re.findall(r"^\| .+ \| `(\w+)` \| ", section, re.MULTILINE)
    methods = [name for name, value in vars(StreamPart).items() if inspect.isfunction(value)]
    asked = [name for name in methods if not name.startswith("_")]
    assert rows == ["StreamPart", *asked]
    assert {name for name in vars(names["MeanFrame"]) if not name.startswith("_")} == set(asked)


# A part from outside, in an engine that serves


@pytest.fixture(name="checkpoint")
def _checkpoint() -> Checkpoint:
    return open_checkpoint(GOLDEN_DIR / "wenet_small").load()


@pytest.fixture(name="serving")
def _serving(names: dict[str, Any], checkpoint: Checkpoint) -> tuple[Engine, Any]:
    engine, means = names["engine_with_means"](checkpoint, ServingConfig.of(max_streams=2))
    return engine, means


def mean_alone(names: dict[str, Any], samples_S: Samples) -> Tensor:
    """Of a stream that no other shares a step with, as far as it has come."""
    checkpoint = open_checkpoint(GOLDEN_DIR / "wenet_small").load()
    engine, means = names["engine_with_means"](checkpoint, ServingConfig.of(max_streams=1))
    ask_one(engine, "alone", samples_S, flags="S")
    return means.sum_SD[0] / int(means.count_S[0])


def test_a_part_from_outside_follows_every_stream(
    names: dict[str, Any], serving: tuple[Engine, Any]
) -> None:
    engine, means = serving
    audio = [noise(1, seconds=2.0), noise(2, seconds=3.2)]
    halves = [(samples_S[:9_000], samples_S[9_000:]) for samples_S in audio]
    ask(engine, *(chunk(i, first_S, flags="S") for i, (first_S, _) in enumerate(halves)))
    ask(engine, *(chunk(i, second_S) for i, (_, second_S) in enumerate(halves)))
    for stream, samples_S in zip(engine.streams, audio, strict=True):
        assert means.count_S[stream.slot] == stream.num_encoder_frames > 0
        mean_D = means.sum_SD[stream.slot] / int(means.count_S[stream.slot])
        torch.testing.assert_close(mean_D, mean_alone(names, samples_S), atol=1e-4, rtol=0.0)
    assert not torch.allclose(*means.sum_SD)


def test_a_part_from_outside_counts_the_real_frames_of_a_short_end(
    names: dict[str, Any], checkpoint: Checkpoint
) -> None:
    config = ServingConfig.of(max_streams=1, tail_padding=False)
    engine, means = names["engine_with_means"](checkpoint, config)
    # Of the second window's 16 encoder frames 7 are real.
    ask_one(engine, "a", noise(1, seconds=1.0), flags="SE")
    assert means.count_S[0] == 16 + 7


def test_a_part_from_outside_forgets_a_stream_that_ends(serving: tuple[Engine, Any]) -> None:
    engine, means = serving
    ask(engine, *(chunk(i, noise(i), flags="SE") for i in range(2)))
    engine.check_integrity()
    ask_one(engine, "next", flags="S")
    (stream,) = engine.streams
    assert means.count_S[stream.slot] == 0
    assert not means.sum_SD[stream.slot].any()


def test_a_part_from_outside_that_cannot_open_leaves_no_stream_behind(
    serving: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, means = serving
    with monkeypatch.context() as patch:
        patch.setattr(means, "open", _refuse)
        error_of(ask_one(engine, "a", noise(1), flags="SE"), "no room for a mean")
    assert_all_is_free(engine)
    assert ask_one(engine, "a", noise(1), flags="SE").error is None


def _refuse(slot: int, options: object) -> None:
    raise StreamLimitError(f"slot {slot}: no room for a mean; end a stream first")
