"""SlotStateCache: declared tensors, a slot a stream, zero at the start."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasr_backend.cache import (
    SlotStateCache,
    SlotStates,
    SlotTensor,
    StreamSlotPool,
    StreamStateSpec,
)
from oasr_backend.errors import (
    ConfigError,
    PoolExhaustedError,
    StreamStateError,
    UnknownStreamError,
)

CPU = torch.device("cpu")
SPECS = (
    StreamStateSpec("tail", (2, 3), slot_axis=1),
    StreamStateSpec("heard", (), dtype=torch.int64),
    StreamStateSpec("prompt", (1,), persistent=True),
)


def make_cache(extra_slots: int = 0) -> SlotStateCache:
    return SlotStateCache(SPECS, 3, CPU, extra_slots=extra_slots)


def test_the_slot_goes_on_the_declared_axis() -> None:
    cache = make_cache(extra_slots=1)
    assert cache.buffer_of("tail").shape == (2, 4, 3)
    assert cache.buffer_of("heard").shape == (4,)
    assert cache.buffer_of("heard").dtype == torch.int64
    assert cache.pad_slots == [3]
    assert cache.nbytes_per_stream == 6 * 4 + 8 + 4


def test_gather_and_scatter_address_rows_in_the_given_order() -> None:
    cache = make_cache()
    view = cache.views([2, 0])["tail"]
    view.scatter(torch.arange(12.0).view(2, 2, 3))
    assert torch.equal(view.gather(), torch.arange(12.0).view(2, 2, 3))
    assert cache.buffer_of("tail")[:, 2].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert not cache.buffer_of("tail")[:, 1].any()


def test_views_take_a_tensor_of_slots_without_copying_it() -> None:
    cache, slots = make_cache(), torch.tensor([1, 2])
    views = cache.views(slots)
    assert set(views) == {"tail", "heard", "prompt"}
    assert all(view.slot_ids is slots for view in views.values())
    assert cache.states.view_of("heard", slots).gather().tolist() == [0, 0]


def test_scatter_refuses_another_shape() -> None:
    with pytest.raises(StreamStateError, match=r"expected \(2, 2, 3\), got \(2, 1, 3\)"):
        make_cache().views([0, 1])["tail"].scatter(torch.zeros(2, 1, 3))


def test_scatter_keeps_no_graph_of_the_model() -> None:
    cache = make_cache()
    cache.views([0])["tail"].scatter(torch.ones(2, 1, 3, requires_grad=True))
    assert not cache.buffer_of("tail").requires_grad


def test_a_used_slot_is_zero_for_its_next_stream() -> None:
    cache = make_cache()
    slot = cache.allocate_stream("a", 1)
    for name in ("tail", "heard", "prompt"):
        cache.fill_slot(name, slot, 5)
    cache.free_stream("a")
    cache.allocate_stream("b", 1)
    for name in ("tail", "heard", "prompt"):
        assert not cache.get_state(name, "b").any()


def test_reset_keeps_persistent_states_and_the_neighbours() -> None:
    cache = make_cache()
    slots = cache.allocate_streams(["a", "b", "c"])
    assert slots == [0, 1, 2]
    for slot in slots:
        for name in ("tail", "heard", "prompt"):
            cache.fill_slot(name, slot, 5)
    cache.reset_streams(["a", "c"])
    assert cache.buffer_of("heard").tolist() == [0, 5, 0]
    assert cache.buffer_of("prompt").flatten().tolist() == [5, 5, 5]
    cache.reset_stream("b")
    assert not cache.buffer_of("tail").any()


def test_allocating_many_is_all_or_nothing() -> None:
    cache = make_cache()
    cache.allocate_stream("a")
    with pytest.raises(StreamStateError):
        cache.allocate_streams(["b", "a"])
    with pytest.raises(PoolExhaustedError):
        cache.allocate_streams(["b", "c", "d"])
    assert cache.allocate_streams(["b", "c"], [2, 1]) == [2, 1]


def test_one_stream_is_seen_through_a_view() -> None:
    cache = make_cache()
    cache.allocate_stream(9, 2)
    state = cache.get_state("tail", 9)
    assert state.shape == (2, 1, 3)
    state.fill_(1)
    assert cache.buffer_of("tail")[:, 2].all()


def test_no_declaration_is_legal_and_still_keeps_slots() -> None:
    cache = SlotStateCache((), 1, CPU)
    assert cache.allocate_stream("a") == 0
    assert cache.views([0]) == {}
    with pytest.raises(PoolExhaustedError):
        cache.allocate_stream("b")


def test_lifecycle_faults_are_named() -> None:
    cache = make_cache(extra_slots=1)
    cache.allocate_stream("a", 0)
    for stream_id, slot, message in (("a", 1, "already"), ("b", 0, "in use"), ("b", 3, "range")):
        with pytest.raises(StreamStateError, match=message):
            cache.allocate_stream(stream_id, slot)
    for call in (cache.free_stream, cache.reset_stream, cache.slot_of):
        with pytest.raises(UnknownStreamError, match="'z'"):
            call("z")
    with pytest.raises(UnknownStreamError, match="declared"):
        cache.buffer_of("nothing")
    with pytest.raises(StreamStateError, match="range"):
        cache.fill_slot("tail", 4, 0)
    cache.fill_slot("tail", 3, 0)


def test_bad_declarations_are_refused() -> None:
    with pytest.raises(ConfigError, match="repeat"):
        SlotStateCache((SPECS[0], SPECS[0]), 1, CPU)
    with pytest.raises(ConfigError, match="max_batch_size=0"):
        SlotStateCache(SPECS, 0, CPU)
    with pytest.raises(ConfigError, match="slot_axis=3"):
        StreamStateSpec("x", (2, 3), slot_axis=3)
    with pytest.raises(ConfigError, match="negative"):
        StreamStateSpec("x", (2, -3))


def test_a_shared_slot_pool_decides_the_slot() -> None:
    slots = StreamSlotPool(3)
    slots.allocate()
    cache = SlotStateCache(SPECS, 3, CPU, slot_pool=slots)
    assert cache.allocate_stream("a") == 1
    cache.free_stream("a")
    assert slots.num_free_slots == 2


def test_a_slot_tensor_stands_alone() -> None:
    view = SlotTensor(torch.zeros(4, 2), torch.tensor([3]))
    view.scatter(torch.ones(1, 2))
    assert view.buffer[3].tolist() == [1, 1]


def test_slots_for_fewer_streams_than_named_allocate_none() -> None:
    cache = make_cache()
    with pytest.raises(StreamStateError, match="1 slots for 2 streams"):
        cache.allocate_streams(["a", "b"], [0])
    assert cache.allocate_streams(["a", "b"], [0, 1]) == [0, 1]


def test_staged_rows_change_when_they_are_stored_and_once() -> None:
    cache = make_cache()
    cache.allocate_stream("a")
    slots = [cache.slot_of("a")]
    for name, view in cache.states.staged_views(slots).items():
        new = torch.ones_like(view.gather())
        with pytest.raises(StreamStateError, match="scatter"):
            view.scatter(torch.ones(1, 2, 3, 4, 5, 6))
        view.scatter(new)
        assert torch.equal(view.gather(), new)
        assert not cache.states.view_of(name, slots).gather().any()
        view.store()
        view.store()
        assert torch.equal(cache.states.view_of(name, slots).gather(), new)


@given(size=st.integers(1, 5), news=st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_a_sliding_window_holds_the_newest_frames_once_they_are_stored(
    size: int, news: list[int]
) -> None:
    states = SlotStates([StreamStateSpec("window", (2, size, 3), slot_axis=1)], 3, CPU)
    rows, history_2BTD = torch.tensor([2, 0]), torch.zeros(2, 2, size, 3)
    for num_new in news:
        new = torch.randn(2, 2, num_new, 3)
        view = states.staged_views(rows)["window"]
        view.roll_in(new, axis=2)
        before, history_2BTD = history_2BTD, torch.cat((history_2BTD, new), dim=2)[:, :, -size:]
        for layer in range(2):
            assert torch.equal(view.layer(layer).gather(), before[layer]), "stored before its time"
        assert torch.equal(view.gather(), history_2BTD)
        view.store()
        view.store()
        assert torch.equal(states.view_of("window", rows).gather(), history_2BTD)
    assert not states.row_of("window", 1).any(), "a row of another stream was written to"


def test_what_is_scattered_or_rolled_in_last_counts() -> None:
    states = SlotStates([StreamStateSpec("window", (1, 2), slot_axis=1)], 1, CPU)
    view = states.staged_views([0])["window"]
    view.roll_in(torch.ones(1, 1, 1), axis=2)
    view.scatter(torch.full((1, 1, 2), 5.0))
    view.store()
    assert states.buffer_of("window").flatten().tolist() == [5.0, 5.0]
    view.scatter(torch.zeros(1, 1, 2))
    view.roll_in(torch.ones(1, 1, 1), axis=2)
    view.store()
    assert states.buffer_of("window").flatten().tolist() == [5.0, 1.0]
