"""Several steps at once, each of other streams: the same texts, and no stream waits for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from oasr_backend.streaming.engine import Engine
from tests.engine_helpers import (
    MARK,
    STRIDE_SAMPLES,
    WINDOW_SAMPLES,
    ask,
    ask_one,
    assert_all_is_free,
    chunk,
    error_of,
    fault_at,
    golden_engine,
    marked,
    noise,
    on_mark,
    text_alone,
)
from tests.guards import GUARD_S, wait_until

NUM_LANES = 3


class Gate:
    """Stops a step whose windows hold a marked one, until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.num_inside = 0

    def __call__(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if MARK in inputs[0][:, 0].tolist():
            self.num_inside += 1
            assert self._opened.wait(GUARD_S)

    def open(self) -> None:
        self._opened.set()


@contextmanager
def gate_in(engine: Engine) -> Iterator[Gate]:
    gate = Gate()
    filterbank = engine.parts.model.get_submodule("frontend.filterbank")
    handle = filterbank.register_forward_pre_hook(gate)
    try:
        yield gate
    finally:
        gate.open()
        handle.remove()


def lane_engine(**settings: Any) -> Engine:
    return golden_engine(**{"steps_at_once": NUM_LANES, "max_step_streams": 4, **settings})


def say(engine: Engine, stream_id: int, seed: int, *, piece: int) -> str:
    """One utterance in pieces, each of which waits for its answer."""
    samples_S = noise(seed)
    pieces = [samples_S[at : at + piece] for at in range(0, samples_S.size, piece)]
    text = ""
    for index, one_S in enumerate(pieces):
        flags = "S" * (index == 0) + "E" * (index == len(pieces) - 1)
        (result,) = engine.process([chunk(stream_id, one_S, flags=flags)])
        assert result.error is None
        text = result.text
    return text


def test_texts_are_the_same_beside_any_others() -> None:
    engine = lane_engine(max_streams=16)
    with ThreadPoolExecutor(8) as threads:
        jobs = [
            threads.submit(say, engine, number, number % 12, piece=3000 + 411 * (number % 7))
            for number in range(36)
        ]
        texts = [job.result(GUARD_S) for job in jobs]
    assert texts == [text_alone(noise(number % 12)) for number in range(36)]
    assert_all_is_free(engine)


def test_a_step_that_stands_still_holds_only_its_own_streams() -> None:
    engine = lane_engine()
    with ThreadPoolExecutor(2) as threads, gate_in(engine) as gate:
        slow = threads.submit(engine.process, [chunk("slow", marked(noise(1)), flags="SE")])
        wait_until(lambda: gate.num_inside == 1, what="the slow step begins")
        assert say(engine, 2, 2, piece=4000) == text_alone(noise(2))
        second = threads.submit(engine.process, [chunk("too", marked(noise(3)), flags="SE")])
        wait_until(lambda: gate.num_inside == 2, what="a second step stands beside it")
        assert say(engine, 4, 4, piece=4000) == text_alone(noise(4))
        assert not slow.done()
        assert engine.step_age_s > 0
        gate.open()
        for job in (slow, second):
            assert job.result(GUARD_S)[0].error is None
    assert engine.step_age_s == 0
    assert_all_is_free(engine)


def test_nobody_steps_a_stream_twice_at_once() -> None:
    engine = lane_engine()
    with ThreadPoolExecutor(1) as threads, gate_in(engine) as gate:
        slow = threads.submit(engine.process, [chunk("slow", marked(noise(1)), flags="SE")])
        wait_until(lambda: gate.num_inside == 1, what="the step begins")
        assert engine.step() == (0, 0), "the only stream is in a step"
        gate.open()
        assert slow.result(GUARD_S)[0].error is None
    assert_all_is_free(engine)


def test_a_close_waits_for_every_lane() -> None:
    engine = lane_engine()
    with ThreadPoolExecutor(3) as threads, gate_in(engine) as gate:
        asked = [
            threads.submit(
                engine.process, [chunk(seed, marked(noise(seed))[:WINDOW_SAMPLES], flags="S")]
            )
            for seed in (1, 2)
        ]
        wait_until(lambda: gate.num_inside == 2, what="both steps go on")
        closing = threads.submit(engine.close)
        with pytest.raises(TimeoutError):
            closing.result(0.05)
        gate.open()
        closing.result(GUARD_S)
        for job in asked:
            assert job.result(GUARD_S)[0].error is None
    assert_all_is_free(engine)


def test_a_fault_in_one_lane_ends_the_streams_of_its_step_alone() -> None:
    engine = lane_engine()
    with ThreadPoolExecutor(1) as threads, gate_in(engine) as gate:
        slow = threads.submit(engine.process, [chunk("slow", marked(noise(1)), flags="SE")])
        wait_until(lambda: gate.num_inside == 1, what="the step begins")
        bad = np.copy(noise(2))
        bad[0] = 1.75
        with fault_at(engine, "filterbank", on_mark(ValueError("no such kernel"), mark=1.75)):
            (failed,) = engine.process([chunk("bad", bad, flags="SE")])
        error_of(failed, "no such kernel", "send START")
        gate.open()
        (result,) = slow.result(GUARD_S)
    assert result.error is None
    assert_all_is_free(engine)


def test_a_share_of_the_ready_streams_is_stepped() -> None:
    engine = lane_engine(max_step_streams=8)
    turns = engine.submit(
        [chunk(seed, noise(seed)[:WINDOW_SAMPLES], flags="S") for seed in range(5)]
    )
    assert engine.step(shares=3) == (5, 3)
    assert [turn.is_done for turn in turns] == [True, True, False, False, False]
    assert engine.step(shares=1) == (3, 0)
    assert all(turn.is_done for turn in turns)
    for seed in range(5):
        rest_S = noise(seed)[WINDOW_SAMPLES:]
        assert ask_one(engine, seed, rest_S, flags="E").text == text_alone(noise(seed))
    assert_all_is_free(engine)


def test_a_new_stream_begins_at_zero_while_another_step_looks_at_the_states() -> None:
    """Opening and stepping beside each other must never zero what a step has just written."""
    engine = lane_engine(max_streams=8)
    expected = {seed: text_alone(noise(seed)) for seed in range(6)}

    def many(number: int) -> list[bool]:
        found = []
        for turn in range(6):
            seed = (number + turn) % 6
            found.append(say(engine, number, seed, piece=STRIDE_SAMPLES) == expected[seed])
        return found

    with ThreadPoolExecutor(6) as threads:
        jobs = [threads.submit(many, number) for number in range(6)]
        assert all(all(job.result(GUARD_S)) for job in jobs)
    ask(engine, chunk("last", noise(0), flags="SE"))
    assert_all_is_free(engine)
