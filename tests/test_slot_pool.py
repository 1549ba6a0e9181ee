"""StreamSlotPool: slots are free or taken once; shared bindings count."""

from __future__ import annotations

import pytest

from oasr_backend.cache import StreamSlotPool
from oasr_backend.errors import (
    ConfigError,
    PoolExhaustedError,
    StreamStateError,
    UnknownStreamError,
)


def test_slots_come_in_order_and_the_oldest_freed_comes_first() -> None:
    pool = StreamSlotPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    pool.free(2)
    pool.free(0)
    assert [pool.allocate(), pool.allocate()] == [2, 0]


def test_returned_slots_come_before_new_ones_where_that_is_asked_for() -> None:
    pool = StreamSlotPool(5, reuses_first=True)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    pool.free(2)
    pool.free(0)
    assert pool.claim(4) == 4
    assert pool.num_free_slots == 3
    for slot in (0, 3, 5):
        with pytest.raises(StreamStateError):
            pool.free(slot)
    assert [pool.allocate() for _ in range(3)] == [2, 0, 3]
    assert pool.num_free_slots == 0


@pytest.mark.parametrize("reuses_first", [False, True])
def test_an_empty_pool_says_so(reuses_first: bool) -> None:
    pool = StreamSlotPool(1, reuses_first=reuses_first)
    pool.allocate()
    with pytest.raises(PoolExhaustedError, match="StreamSlotPool exhausted"):
        pool.allocate()


@pytest.mark.parametrize("slot", [-1, 2, 0])
def test_freeing_a_foreign_or_free_slot_is_refused(slot: int) -> None:
    pool = StreamSlotPool(2)
    with pytest.raises(StreamStateError):
        pool.free(slot)
    assert pool.num_free_slots == 2


def test_claiming_takes_the_very_slot_once() -> None:
    pool = StreamSlotPool(3)
    assert pool.claim(1) == 1
    for slot in (1, 3):
        with pytest.raises(StreamStateError):
            pool.claim(slot)
    assert [pool.allocate(), pool.allocate()] == [0, 2]


def test_bindings_of_one_stream_share_a_slot_until_the_last_is_undone() -> None:
    pool = StreamSlotPool(2)
    assert pool.bind("a") == pool.bind("a") == 0
    assert pool.bind(1) == 1
    pool.unbind("a")
    assert pool.num_free_slots == 0
    pool.unbind("a")
    assert pool.num_free_slots == 1
    with pytest.raises(UnknownStreamError):
        pool.unbind("a")


def test_a_failed_binding_leaves_no_trace() -> None:
    pool = StreamSlotPool(1)
    pool.bind("a")
    with pytest.raises(PoolExhaustedError):
        pool.bind("b")
    with pytest.raises(UnknownStreamError):
        pool.unbind("b")


def test_a_pool_of_no_slots_is_refused() -> None:
    with pytest.raises(ConfigError):
        StreamSlotPool(0)
