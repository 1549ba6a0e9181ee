"""The lock serves threads in order of arrival, even against one that comes again at once."""

from __future__ import annotations

import threading
import time

import pytest

from oasr_backend.streaming.fair_lock import FairLock
from tests.engine_helpers import ask_one, chunk, golden_engine, noise
from tests.guards import GUARD_S, wait_until


def test_only_one_thread_is_inside() -> None:
    lock, inside, most = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(200):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    assert not any(thread.is_alive() for thread in threads)
    assert most == [1]


def test_waiters_enter_in_the_order_they_came() -> None:
    lock, order = FairLock(), list[int]()

    def enter(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(5)]
    with lock:
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda number=number: len(lock._waiters) == number, what="it waits")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_an_error_inside_lets_the_next_one_in() -> None:
    lock = FairLock()
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"), lock:
            raise ValueError("inside")


def test_a_thread_that_steps_without_a_pause_keeps_no_request_out() -> None:
    engine = golden_engine()
    (long,) = engine.submit([chunk("long", noise(1, seconds=60), flags="SE")])

    def step_on() -> None:
        while not long.is_done:
            engine.step()

    thread = threading.Thread(target=step_on)
    thread.start()
    num_before_done = 0
    while not long.is_done and num_before_done < 20:
        assert ask_one(engine, "other", noise(2)[:5000], flags="SE").error is None
        num_before_done += 1
    thread.join(GUARD_S)
    assert num_before_done == 20, "sixty seconds are ninety-odd steps; each request waits for few"


def test_the_holder_lets_others_in_and_comes_back_in_turn() -> None:
    lock, order = FairLock(), list[str]()

    def enter() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=enter)
    with lock:
        thread.start()
        with lock.released():
            thread.join(GUARD_S)
        order.append("holder")
    assert order == ["other", "holder"]
