"""The code of docs/add_a_cache.md runs, and does what the text around it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from oasr_backend.models import EncoderCaches
from oasr_backend.streaming.store import StreamCaches
from tests.conftest import ROOT
from tests.doc_blocks import run_document

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


def test_the_places_to_extend_exist() -> None:
    classes = {"StreamCaches": StreamCaches, "EncoderCaches": EncoderCaches}
    places = re.findall(
        r"\| `(StreamCaches|EncoderCaches)\.(\w+)` \|", DOCUMENT.read_text(encoding="utf-8")
    )
    assert len(places) == 7
    assert all(hasattr(classes[owner], method) for owner, method in places)
