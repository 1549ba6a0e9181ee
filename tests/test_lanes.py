"""Lanes hold one thread each, in the order of arrival; who wants all of them gets them."""

from __future__ import annotations

import threading
import time

import pytest

from oasr_backend.streaming.lanes import Lanes, News
from tests.guards import GUARD_S, wait_until


def test_a_lane_has_one_thread_and_all_lanes_are_used() -> None:
    lanes, guard = Lanes(3), threading.Lock()
    inside, used, most = set[int](), set[int](), [0]

    def work() -> None:
        for _ in range(60):
            with lanes.one() as lane:
                with guard:
                    assert lane not in inside
                    inside.add(lane)
                    used.add(lane)
                    most[0] = max(most[0], len(inside))
                time.sleep(0.0005)
                with guard:
                    inside.remove(lane)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    assert not any(thread.is_alive() for thread in threads)
    assert used == {0, 1, 2}
    assert most == [3]


def test_a_lane_that_is_given_back_is_the_next_one_taken() -> None:
    lanes = Lanes(4)
    for _ in range(3):
        with lanes.one() as lane:
            assert lane == 0
    with lanes.one(), lanes.one() as second:
        assert second == 1


def test_waiters_get_the_lane_in_the_order_they_came() -> None:
    lanes, order = Lanes(1), list[int]()

    def enter(number: int) -> None:
        with lanes.one():
            order.append(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(5)]
    with lanes.one():
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda number=number: len(lanes._waiters) == number, what="it waits")
    for thread in threads:
        thread.join(GUARD_S)
    assert order == [0, 1, 2, 3, 4]


def test_all_lanes_wait_for_every_thread_and_two_who_ask_do_not_block_each_other() -> None:
    lanes, at_rest, seen = Lanes(2), [0], list[int]()
    is_stopped = threading.Event()

    def step() -> None:
        while not is_stopped.is_set():
            with lanes.one():
                seen.append(at_rest[0])

    def rest() -> None:
        for _ in range(20):
            with lanes.all():
                at_rest[0] += 1
                time.sleep(0.0005)
                at_rest[0] -= 1

    stepping = [threading.Thread(target=step) for _ in range(3)]
    resting = [threading.Thread(target=rest) for _ in range(3)]
    for thread in (*stepping, *resting):
        thread.start()
    for thread in resting:
        thread.join(GUARD_S)
    is_stopped.set()
    for thread in stepping:
        thread.join(GUARD_S)
    assert not any(thread.is_alive() for thread in (*stepping, *resting))
    assert seen
    assert set(seen) == {0}


def test_an_error_inside_gives_the_lane_back() -> None:
    lanes = Lanes(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"), lanes.one():
            raise ValueError("inside")
        with pytest.raises(ValueError, match="inside"), lanes.all():
            raise ValueError("inside")
    with lanes.one() as lane:
        assert lane == 0


def test_news_that_came_before_the_wait_ends_it_at_once() -> None:
    news = News()
    seen = news.count
    news.tell()
    news.wait_past(seen, timeout_s=GUARD_S)
    begin_s = time.monotonic()
    news.wait_past(news.count, timeout_s=0.02)
    assert time.monotonic() - begin_s >= 0.015, "nothing has happened, yet the wait ended"
