"""One recording gives one text, whatever its cutting, type, protocol and company."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from tests.conftest import LiveServer
from tests.triton.conftest import Pcm16
from tests.triton.wire import AsyncWire, Wire, run_async

MS = 16
FIXED_PIECES_MS = (10, 37, 100, 640, 690, 1000, 5000)
NUM_RANDOM_CUTTINGS = 20
WAYS = [(protocol, dtype) for protocol in ("grpc", "http") for dtype in ("int16", "float32")]


def typed(pcm: Pcm16, dtype: str) -> Any:
    return pcm if dtype == "int16" else pcm.astype(np.float32) / np.float32(32768)


def cut_every(samples: Any, size: int) -> list[Any]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def cut_at_random(samples: Any, seed: int) -> list[Any]:
    chance = np.random.default_rng(seed)
    edges = np.sort(chance.integers(0, len(samples) + 1, chance.integers(1, 25)))
    return list(np.split(samples, edges))


def cuttings(samples: Any) -> Iterator[list[Any]]:
    yield from (cut_every(samples, ms * MS) for ms in FIXED_PIECES_MS)
    yield from (cut_at_random(samples, seed) for seed in range(NUM_RANDOM_CUTTINGS))


@pytest.mark.parametrize(("protocol", "dtype"), WAYS)
def test_a_text_does_not_depend_on_the_cutting(
    live_server: LiveServer,
    recordings: list[Pcm16],
    expected: list[str],
    protocol: str,
    dtype: str,
) -> None:
    samples = typed(recordings[0], dtype)
    own_share = list(cuttings(samples))[WAYS.index((protocol, dtype)) :: len(WAYS)]
    with Wire(live_server.server, live_server.model_name, protocol) as wire:
        for number, pieces in enumerate(own_share):
            assert wire.stream(f"alone-{protocol}-{dtype}-{number}", pieces) == expected[0]


@pytest.mark.parametrize(("protocol", "dtype"), [("grpc", "float32"), ("http", "int16")])
def test_single_samples_around_the_edge_of_a_window_change_nothing(
    live_server: LiveServer,
    recordings: list[Pcm16],
    expected: list[str],
    protocol: str,
    dtype: str,
) -> None:
    samples, edge = typed(recordings[0], dtype), 10960
    pieces = [*cut_every(samples[:50], 1), samples[50 : edge - 50]]
    pieces += cut_every(samples[edge - 50 : edge + 50], 1)
    pieces += [samples[edge + 50 : -50], *cut_every(samples[-50:], 1)]
    with Wire(live_server.server, live_server.model_name, protocol) as wire:
        assert wire.stream(f"single-{dtype}", pieces) == expected[0]


def test_every_cutting_at_once_among_32_neighbours_gives_the_same_text(
    live_server: LiveServer, recordings: list[Pcm16], expected: list[str]
) -> None:
    kinds = cycle(["int16", "float32"])
    probes = [typed(recordings[0], next(kinds)) for _ in range(len(FIXED_PIECES_MS) + 20)]
    probe_pieces = [list(cuttings(x))[index] for index, x in enumerate(probes)]
    others = [(index % len(recordings)) for index in range(32)]
    other_pieces = [cut_at_random(recordings[who], 100 + i) for i, who in enumerate(others)]

    async def act(wire: AsyncWire) -> list[str]:
        streams = [*probe_pieces, *other_pieces]
        return await asyncio.gather(
            *(wire.stream(f"among-{i}", pieces) for i, pieces in enumerate(streams))
        )

    texts = run_async(live_server.server, live_server.model_name, act)
    assert set(texts[: len(probes)]) == {expected[0]}
    assert texts[len(probes) :] == [expected[who] for who in others]


def test_both_protocols_at_once_share_their_steps(
    live_server: LiveServer, recordings: list[Pcm16], expected: list[str]
) -> None:
    async def act(wire: AsyncWire) -> list[str]:
        def over_http(index: int) -> str:
            with Wire(live_server.server, live_server.model_name, "http") as http:
                return http.stream(f"http-{index}", cut_every(recordings[index], 320 * MS))

        return await asyncio.gather(
            *(asyncio.to_thread(over_http, i) for i in range(3)),
            *(wire.stream(f"grpc-{i}", cut_every(recordings[i], 640 * MS)) for i in range(3)),
        )

    texts = run_async(live_server.server, live_server.model_name, act)
    assert texts == [*expected[:3], *expected[:3]]


def test_two_hundred_tasks_of_several_utterances_meet_no_error(
    live_server: LiveServer, recordings: list[Pcm16]
) -> None:
    brief = recordings[0][:12000]

    async def act(wire: AsyncWire) -> list[str]:
        async def task(number: int) -> list[str]:
            pieces = np.split(brief, [500 + 10 * number, 9000])
            return [await wire.stream(1000 + number, pieces) for _ in range(2)]

        done = await asyncio.gather(*(task(number) for number in range(200)))
        return [text for texts in done for text in texts]

    texts = run_async(live_server.server, live_server.model_name, act)
    with Wire(live_server.server, live_server.model_name) as wire:
        assert set(texts) == {wire.send(1, brief, "SE")}
    assert len(texts) == 400
