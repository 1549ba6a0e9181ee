"""Clients that fall silent, vanish, START twice, cancel calls or come in crowds.

The checkpoint is the small golden one: idle limits of seconds are far above what its steps take.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from benchmarks.chaos.health import wait_until_published
from tests.guards import wait_until
from tests.triton.conftest import Pcm16
from tests.triton.variants import GOLDEN, LoadedModel, Variant, VariantServer
from tests.triton.wire import (
    AsyncWire,
    audio,
    run_async,
    sequence,
    status_of,
)

MAX_STREAMS = 6
TRITON_IDLE_S, STREAM_IDLE_S = 2.0, 3.5
#: Out of reach: a stream that finds room gets it in another way.
NEVER_S = 3600.0


@pytest.fixture(scope="module", name="model")
def _model(variant_server: VariantServer) -> Iterator[LoadedModel]:
    with variant_server.loaded(brisk("brisk", stream_idle_s=STREAM_IDLE_S)) as model:
        yield model


def brisk(name: str, *, stream_idle_s: float) -> Variant:
    return Variant(
        name,
        {"max_streams": str(MAX_STREAMS), "stream_idle_timeout_s": str(stream_idle_s)},
        checkpoint_dir=GOLDEN,
        triton_idle_s=TRITON_IDLE_S,
        max_candidates=4 * MAX_STREAMS,
    )


@pytest.fixture(scope="module", name="expected")
def _expected(model: LoadedModel, recordings: list[Pcm16]) -> list[str]:
    """Each recording's final text when it comes in one request."""
    with model.wire() as wire:
        texts = [wire.send(f"alone {i}", pcm, "SE") for i, pcm in enumerate(recordings)]
    assert len(set(texts)) == len(texts), "a mix-up shows"
    return texts


@pytest.fixture(autouse=True)
def _every_block_comes_back(model: LoadedModel) -> Iterator[None]:
    yield
    wait_until_empty(model)


def wait_until_empty(model: LoadedModel) -> None:
    def is_empty() -> bool:
        now = model.metrics()
        return now.get("oasr_active_streams") == 0 and now.get("oasr_used_blocks") == 0

    wait_until_published(model.server, model.name)
    wait_until(is_empty, what="every stream and block is free again")


def test_a_late_chunk_is_told_to_start_and_a_start_works_again(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str]
) -> None:
    with model.wire() as wire:
        wire.send(7, recordings[0], "S")
        wait_until_empty(model)
        with pytest.raises(InferenceServerException, match="must specify the START flag") as late:
            wire.send(7, recordings[0])
        assert status_of(late.value) == "INVALID_ARGUMENT"
        assert wire.send(7, recordings[0], "SE") == expected[0]
    assert model.metrics()["oasr_streams_reaped_total"] >= 1


def test_a_client_that_vanishes_gives_its_stream_back(
    model: LoadedModel, recordings: list[Pcm16]
) -> None:
    for stream_id in range(100, 100 + MAX_STREAMS):
        with model.wire() as wire:
            wire.send(stream_id, recordings[0][:16000], "S")


def test_a_second_start_begins_a_new_stream(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str]
) -> None:
    before = model.metrics().get("oasr_conflicts_total", 0)
    with model.wire() as wire:
        wire.send(8, recordings[1][:20000], "S")
        wire.send(8, recordings[1][20000:])
        first, last = np.array_split(recordings[0], 2)
        wire.send(8, first, "S")
        assert wire.send(8, last, "E") == expected[0]
    wait_until(
        lambda: model.metrics()["oasr_conflicts_total"] == before + 1,
        what="the conflict is counted",
    )


def test_utterances_pipelined_without_waiting_never_mix(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str]
) -> None:
    async def act(wire: AsyncWire) -> list[Any]:
        calls = []
        for index in (0, 1):
            calls.append(wire.send(9, recordings[index], "S"))
            calls.append(wire.send(9, recordings[index][:0], "E"))
        return await asyncio.gather(*calls, return_exceptions=True)

    finals: list[str] = []
    # Calls that are sent at once may arrive in any order; in some the ENDs come first.
    for _ in range(8):
        outcomes = run_async(model.server, model.name, act)
        for outcome in outcomes:
            if isinstance(outcome, InferenceServerException) and not was_overtaken(outcome):
                assert status_of(outcome) == "INVALID_ARGUMENT"
                assert "START" in str(outcome.message())
        finals += [text for text in outcomes[1::2] if isinstance(text, str)]
        assert set(finals) <= set(expected[:2])
        if finals:
            break
    assert finals


def was_overtaken(error: InferenceServerException) -> bool:
    """Whether an END got in front of the request between Triton's two steps to queue it.

    Triton cancels such a request without a word; the backend gives its reason when it does so.
    """
    return status_of(error) == "CANCELLED" and not error.message()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_numbered_requests_out_of_order_are_errors_and_never_another_text(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str], order: tuple[int, ...]
) -> None:
    pieces = list(zip(np.array_split(recordings[0], 3), ("S", "", "E"), strict=True))

    async def act(wire: AsyncWire) -> list[Any]:
        calls = [wire.send(10, *pieces[index], parameters={"chunk_seq": index}) for index in order]
        return await asyncio.gather(*calls, return_exceptions=True)

    for outcome in run_async(model.server, model.name, act):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, InferenceServerException)
            assert was_overtaken(outcome) or status_of(outcome) == "INVALID_ARGUMENT"
        else:
            assert expected[0].startswith(outcome)


def test_one_more_stream_is_refused_at_once_while_the_others_go_on(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str]
) -> None:
    async def act(wire: AsyncWire) -> tuple[list[str], list[float], float]:
        ids = [f"in {i}" for i in range(MAX_STREAMS)]
        await asyncio.gather(*(wire.send(name, recordings[0][:8000], "S") for name in ids))
        refusals_s = []
        for attempt in range(5):
            begin_s = time.perf_counter()
            with pytest.raises(InferenceServerException, match="max_streams") as refused:
                await wire.send(f"out {attempt}", recordings[0][:8000], "S")
            refusals_s.append(time.perf_counter() - begin_s)
            assert status_of(refused.value) == "UNAVAILABLE"
            assert str(MAX_STREAMS) in str(refused.value.message())
        begin_s = time.perf_counter()
        texts = await asyncio.gather(*(wire.send(name, recordings[0][8000:], "E") for name in ids))
        return texts, refusals_s, time.perf_counter() - begin_s

    texts, refusals_s, served_s = run_async(model.server, model.name, act)
    assert texts == [expected[0]] * MAX_STREAMS
    assert min(refusals_s) < served_s, "a refusal needs no step"
    assert model.metrics()["oasr_max_streams"] == MAX_STREAMS


def test_a_stream_that_triton_forgot_makes_room_before_its_own_limit(
    variant_server: VariantServer, recordings: list[Pcm16]
) -> None:
    statuses: list[str] = []
    variant = brisk("forgetful", stream_idle_s=NEVER_S)
    with variant_server.loaded(variant) as model, model.wire() as wire:
        expected = wire.send("alone", recordings[0], "SE")
        for index in range(MAX_STREAMS):
            wire.send(f"dead {index}", recordings[0][:8000], "S")
        begin_s = time.monotonic()
        text = ""
        while not text:
            try:
                text = wire.send("heir", recordings[0], "SE")
            except InferenceServerException as error:
                statuses.append(status_of(error))
                time.sleep(0.1)
        waited_s = time.monotonic() - begin_s
    assert text == expected
    assert set(statuses) == {"UNAVAILABLE"}
    assert waited_s > TRITON_IDLE_S - 0.3


def test_cancelled_calls_free_their_streams_and_hurt_nobody(
    model: LoadedModel, recordings: list[Pcm16], expected: list[str]
) -> None:
    async def act(wire: AsyncWire) -> list[str]:
        async def cancelled(number: int) -> None:
            await wire.send(f"cancelled {number}", recordings[0][:8000], "S")
            call = asyncio.ensure_future(wire.send(f"cancelled {number}", recordings[2]))
            await asyncio.sleep(0.002 * number)
            call.cancel()

        good = [wire.stream(f"kept {i}", np.array_split(recordings[i], 4)) for i in range(3)]
        outcome = await asyncio.gather(*good, *(cancelled(i) for i in range(3)))
        return [text for text in outcome if text is not None]

    assert run_async(model.server, model.name, act) == expected[:3]


# tritonclient's reader thread raises when its stream is cancelled.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_grpc_stream_that_is_closed_early_is_freed(
    model: LoadedModel, recordings: list[Pcm16]
) -> None:
    client = tritonclient.grpc.InferenceServerClient(model.server.grpc_url)
    client.start_stream(lambda _result, _error: None)
    for index in range(10):
        flags = "S" if index == 0 else ""
        client.async_stream_infer(
            model.name, audio(tritonclient.grpc, recordings[0]), **sequence("left", flags)
        )
    client.stop_stream(cancel_requests=True)
    client.close()


def test_a_burst_of_utterances_is_served_without_an_error(
    model: LoadedModel, recordings: list[Pcm16]
) -> None:
    """Many more utterances than streams, one after the other on as many tasks as there is room."""

    async def act(wire: AsyncWire) -> int:
        async def task(number: int) -> int:
            for _ in range(8):
                pieces = np.array_split(recordings[0][:12000], 3)
                await wire.stream(f"burst {number}", [*pieces, recordings[0][:0]])
            return 8

        return sum(await asyncio.gather(*(task(number) for number in range(MAX_STREAMS))))

    assert run_async(model.server, model.name, act) == 8 * MAX_STREAMS
