"""The figures that an operator sees, and the delay of a caller while another sends a minute."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from pathlib import Path

import numpy as np

from benchmarks.chaos.health import wait_until_published
from oasr_backend.metrics import EngineMetrics
from tests.conftest import LiveServer
from tests.guards import GUARD_S, wait_until
from tests.triton.conftest import Pcm16
from tests.triton.wire import (
    AsyncWire,
    Wire,
    metrics,
    run_async,
)


def test_every_metric_of_the_engine_is_on_the_metrics_port(
    live_server: LiveServer, recordings: list[Pcm16], expected: list[str]
) -> None:
    with Wire(live_server.server, live_server.model_name) as wire:
        wire.send("observed", recordings[0][:20000], "S")
        wait_until(
            lambda: metrics(live_server.server, live_server.model_name)["oasr_used_blocks"] >= 1,
            what="the stream is seen",
        )
        wait_until_published(live_server.server)
        now = metrics(live_server.server, live_server.model_name)
        wire.send("observed", recordings[0][20000:], "E")
    assert now["oasr_used_blocks"] >= 1
    assert now["oasr_free_blocks"] > 0
    assert now["oasr_healthy"] == 1
    assert now['oasr_finished_total{reason="end"}'] >= len(expected)
    assert min(now["oasr_audio_seconds_total"], now["oasr_compute_seconds_total"]) > 0
    assert now["oasr_step_width_count"] == now['oasr_step_width_bucket{le="+Inf"}'] > 0
    assert set(EngineMetrics().__dataclass_fields__) >= {"rejected", "conflicts"}
    names = {name.partition("{")[0] for name in now}
    assert names >= {sample.name for sample in EngineMetrics().readings()}


def test_a_heartbeat_goes_on_while_nothing_else_changes(live_server: LiveServer) -> None:
    def beat_s() -> float:
        return metrics(live_server.server, live_server.model_name)["oasr_heartbeat_seconds"]

    first_s, begin_s = beat_s(), int(time.time())
    wait_until(lambda: beat_s() >= max(first_s, begin_s) + 2, what="two more beats")
    assert beat_s() <= time.time(), "they are seconds since 1970"


def test_triton_counts_our_batches(live_server: LiveServer, expected: list[str]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(live_server.metrics_url, timeout=GUARD_S) as response:
        text = response.read().decode()
    found = re.search(r'nv_inference_count\{model="oasr_streaming".*\} (\d+)', text)
    assert found
    assert int(found[1]) >= len(expected)


def test_the_log_tells_a_streams_story_by_its_id(
    live_server: LiveServer, recordings: list[Pcm16]
) -> None:
    # The id has letters that the C locale lacks.
    name = "histoire-contée-7f3a"
    with Wire(live_server.server, live_server.model_name) as wire:
        wire.stream(name, [recordings[0], recordings[0][:0]])
    log = live_server.server.log_path
    assert isinstance(log, Path)
    wait_until(lambda: log.read_text("utf-8").count(name) >= 2, what="both lines are there")
    lines = [line for line in log.read_text("utf-8").splitlines() if name in line]
    assert "event=stream_open" in lines[0]
    assert re.search(r"event=stream_close .*generation=\d+ reason=end audio_s=\d+\.\d\d", lines[-1])


def test_a_minute_sent_at_once_does_not_hold_up_the_others(
    live_server: LiveServer, recordings: list[Pcm16], expected: list[str]
) -> None:
    minute = np.resize(np.concatenate(recordings), 60 * 16000)

    async def act(wire: AsyncWire) -> tuple[list[str], float, float]:
        begin_s = time.perf_counter()
        long = asyncio.ensure_future(wire.send("minute", minute, "SE"))
        await asyncio.sleep(0.05)
        others = [wire.stream(f"brief {i}", np.array_split(recordings[i], 4)) for i in range(3)]
        texts = await asyncio.gather(*others)
        others_s = time.perf_counter() - begin_s
        assert not long.done(), "the others are through first"
        assert len((await long).split()) > 50
        return texts, others_s, time.perf_counter() - begin_s

    texts, others_s, long_s = run_async(live_server.server, live_server.model_name, act)
    assert texts == expected[:3]
    assert others_s < 0.7 * long_s
