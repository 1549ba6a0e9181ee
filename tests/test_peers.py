"""The comparison with sherpa-onnx: its export is the served model, and its arithmetic is right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from oasr_client.manifest import Reference, word_errors
from rich.console import Console

from benchmarks.accuracy import recordings
from benchmarks.baseline import engine_text
from benchmarks.peers import paced, processes, table, throughput
from benchmarks.peers.__main__ import main
from benchmarks.peers.callers import CallError, Heard, Speech, call_peer
from benchmarks.peers.export import ExportedModel, export_checkpoint, first_state
from benchmarks.peers.packages import MissingPackageError, require
from benchmarks.peers.recogniser import PeerRecogniser
from benchmarks.peers.throughput import Rates
from benchmarks.peers.workers import Turn
from benchmarks.report import Figure
from benchmarks.workload import CHUNK_SAMPLES, SAMPLE_RATE, read_audio
from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.parity import stream_log_probs
from oasr_backend.streaming.assemble import load_engine
from tests.conftest import DEMO_DIR, GOLDEN_DIR
from tests.same_results import TOLERANCE

CHUNK, LEFT_CHUNKS = 16, 4
HISTORY, STRIDE, WINDOW = CHUNK * LEFT_CHUNKS, 64, 67
NUM_WINDOWS = 9


@pytest.fixture(scope="module", name="exported")
def _exported(tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    return export_checkpoint(DEMO_DIR, tmp_path_factory.mktemp("export"))


def exported_log_probs(model: Path, checkpoint: Path, feats_TF: np.ndarray) -> np.ndarray:
    """Whole windows only, with the state and the mask as sherpa-onnx hands them over."""
    session = require("onnxruntime").InferenceSession(
        str(model), providers=["CPUExecutionProvider"]
    )
    attn_cache, conv_cache = (
        cache.numpy()
        for cache in first_state(open_checkpoint(checkpoint).load(), num_history=HISTORY)
    )
    found = []
    for window in range((len(feats_TF) - WINDOW) // STRIDE + 1):
        mask = np.ones((1, 1, HISTORY + CHUNK), dtype=bool)
        mask[:, :, : max(0, HISTORY - window * CHUNK)] = False
        inputs = {
            "x": feats_TF[None, window * STRIDE : window * STRIDE + WINDOW],
            "offset": np.array([HISTORY + window * CHUNK]),
            "required_cache_size": np.array([HISTORY]),
            "attn_cache": attn_cache,
            "conv_cache": conv_cache,
            "attn_mask": mask,
        }
        log_probs_NTV, attn_cache, conv_cache = session.run(None, inputs)
        found.append(log_probs_NTV[0])
    return np.concatenate(found)


def features(num_bins: int) -> np.ndarray:
    """Long enough for a full history, and more."""
    generator = np.random.default_rng(1)
    shape = (STRIDE * (NUM_WINDOWS - 1) + WINDOW, num_bins)
    return generator.normal(10.0, 3.0, shape).astype(np.float32)


@pytest.mark.parametrize("name", ["demo", "wenet_small", "wenet_bn_k31"])
def test_the_export_gives_the_log_probs_of_the_served_path(name: str, tmp_path: Path) -> None:
    checkpoint = DEMO_DIR if name == "demo" else GOLDEN_DIR / name
    exported = export_checkpoint(checkpoint, tmp_path)
    feats_TF = features(open_checkpoint(checkpoint).info.frames.num_bins)
    ours_TV = stream_log_probs(checkpoint, feats_TF, chunk_size=CHUNK, num_left_chunks=LEFT_CHUNKS)
    theirs_TV = exported_log_probs(exported.fp32, checkpoint, feats_TF)
    assert theirs_TV.shape == (NUM_WINDOWS * CHUNK, ours_TV.shape[1])
    np.testing.assert_allclose(theirs_TV, ours_TV, atol=TOLERANCE, rtol=0)


def test_the_int8_export_is_smaller_and_hears_nearly_the_same(exported: ExportedModel) -> None:
    assert exported.int8.stat().st_size < 0.8 * exported.fp32.stat().st_size
    feats_TF = features(80)
    exact_TV = exported_log_probs(exported.fp32, DEMO_DIR, feats_TF)
    rounded_TV = exported_log_probs(exported.int8, DEMO_DIR, feats_TF)
    assert np.abs(exact_TV - rounded_TV).max() > 0
    assert np.mean(exact_TV.argmax(-1) == rounded_TV.argmax(-1)) > 0.95


def test_sherpa_onnx_hears_in_the_export_what_the_engine_hears(exported: ExportedModel) -> None:
    spoken = recordings()[-10::2]
    engine = load_engine(DEMO_DIR, ServingConfig.of(max_streams=1), device="cpu")
    peer = PeerRecogniser(exported, exported.fp32, num_threads=1)
    ours, theirs = [], {}
    for one in spoken:
        samples_S = read_audio(one.audio)
        starts = range(0, samples_S.size, CHUNK_SAMPLES)
        chunks = [samples_S[start : start + CHUNK_SAMPLES] for start in starts]
        ours.append(Reference(one.audio, engine_text(engine, chunks)))
        theirs[one.audio] = engine_text(peer, chunks)
    errors = word_errors(ours, theirs)
    assert errors.num_words > 30
    assert errors.rate < 0.02


def test_an_encoder_that_the_graph_does_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no checkpoint that a reader knows"):
        export_checkpoint(tmp_path, tmp_path)


def test_a_missing_package_is_named_with_the_command_that_brings_it() -> None:
    with pytest.raises(MissingPackageError, match=r"no_such_peer.*oasr-backend\[bench\]"):
        require("no_such_peer")


def test_the_rate_of_a_crew_is_the_sum_of_its_processes() -> None:
    rates = Rates()
    rates.add([Turn(audio_s=20.0, wall_s=1.0, cpu_s=0.5), Turn(30.0, 2.0, 2.0)])
    assert rates.wall == [20.0 + 15.0]
    assert rates.cpu == [50.0 / 2.5]


def test_the_better_arrangement_is_chosen_for_each_rate_and_named() -> None:
    rates = {
        ("ours", "threads"): Rates(wall=[4.0, 6.0, 5.0], cpu=[2.0, 2.0, 2.0]),
        ("ours", "processes"): Rates(wall=[4.0, 4.0, 9.0], cpu=[3.0, 3.0, 3.0]),
        ("peer", "threads"): Rates(wall=[2.0, 2.0, 2.0], cpu=[6.0, 6.0, 6.0]),
    }
    outcome = throughput.Outcome([], {})
    throughput._add_figures(outcome, rates, 8)
    medians = {figure.name: figure.median for figure in outcome.figures}
    assert medians["8 streams: ours"] == 5.0
    assert medians["8 streams: ours, CPU"] == 3.0
    assert outcome.arrangements["8 streams: ours"] == "threads"
    assert outcome.arrangements["8 streams: ours, CPU"] == "processes"
    assert medians["8 streams: ours, processes"] == 4.0
    assert medians["8 streams: peer, ours / this"] == 2.5
    assert medians["8 streams: peer, ours / this, CPU"] == 0.5


@pytest.mark.parametrize("post_s", [0.16, 0.32, 0.64])
def test_both_recognisers_need_the_same_post_for_a_window(post_s: float) -> None:
    size = round(post_s * SAMPLE_RATE)
    samples_S = np.zeros(size * round(6.4 / post_s), dtype=np.float32)
    exported = ExportedModel(*[Path()] * 3, chunk_size=CHUNK, num_left_chunks=LEFT_CHUNKS)
    speech = paced._speech(samples_S, exported, post_s)
    for window, post in enumerate(speech.window_posts):
        needed_s = 0.685 + 0.64 * window
        assert speech.due_s(post - 1) < needed_s <= speech.due_s(post)
    assert len(speech.window_posts) == 9


def test_posts_that_part_the_recognisers_are_refused() -> None:
    exported = ExportedModel(*[Path()] * 3, chunk_size=CHUNK, num_left_chunks=LEFT_CHUNKS)
    samples_S = np.zeros(6 * SAMPLE_RATE, dtype=np.float32)
    with pytest.raises(ValueError, match=r"0\.68625 s .* choose posts of 0\.16 or 0\.64 s"):
        paced._speech(samples_S, exported, 0.68625)


SPEECH = Speech(posts=[np.zeros(160, dtype=np.float32)] * 6, post_s=0.01, window_posts=[1, 3, 5])


@contextlib.asynccontextmanager
async def fake_peer(num_answers: int, *, delay_s: float, is_done: bool) -> AsyncIterator[str]:
    """Answers every second post after `delay_s`, as often as told, then the final text."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        posts = answers = 0
        async for message in socket:
            posts += isinstance(message.data, bytes)
            if isinstance(message.data, bytes) and posts % 2 == 0 and answers < num_answers:
                answers += 1
                await asyncio.sleep(delay_s)
                await socket.send_str(json.dumps({"text": f" words {answers}"}))
            if message.data == "Done":
                if is_done:
                    await socket.send_str("Done!")
                break
        return socket

    application = web.Application()
    application.router.add_get("/", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/"
    finally:
        await runner.cleanup()


async def hear(num_answers: int, *, delay_s: float = 0.0, is_done: bool = True) -> Heard:
    async with (
        fake_peer(num_answers, delay_s=delay_s, is_done=is_done) as url,
        ClientSession() as session,
    ):
        start_s = asyncio.get_running_loop().time()
        return await call_peer(session, url, SPEECH, start_s=start_s)


def test_a_latency_counts_from_the_post_that_completes_the_window() -> None:
    heard = asyncio.run(hear(3, delay_s=0.05))
    # Posts complete windows every 0.02 s, and each answer waits for the one before.
    assert heard.window_s[0] > 0.049
    assert heard.window_s[1] > 0.079
    assert heard.window_s[2] > 0.109
    assert heard.final_s == pytest.approx(heard.window_s[2], abs=1e-6)
    assert heard.text == "words 3"


def test_a_window_without_an_answer_is_an_error() -> None:
    with pytest.raises(CallError, match="answered 2 of 3 windows"):
        asyncio.run(hear(2))


def test_a_call_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(CallError, match="closed the connection before"):
        asyncio.run(hear(3, is_done=False))


BUSY_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
while time.process_time() < 0.3:
    pass
print(child.pid, flush=True)
input()
child.communicate(b"\\n")
"""


def test_a_process_tree_is_counted_with_its_children() -> None:
    before_s = processes.cpu_s(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", BUSY_PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.tree(parent.pid) == [parent.pid, child]
        assert processes.cpu_s(parent.pid) >= 0.25
        assert processes.cpu_s(os.getpid()) >= before_s + 0.25
        alone, both = processes.memory(child), processes.memory(parent.pid)
        parent.communicate("\n")
    assert 0 < alone.pss_mib < both.pss_mib
    assert both.pss_mib < both.rss_mib
    assert processes.cpu_s(parent.pid) == 0


def test_the_tables_hold_every_figure_under_its_subject() -> None:
    console = Console(record=True, width=120)
    table.show(
        [
            Figure("8 streams: ours", "audio s/s", [3.0, 4.0, 5.0]),
            Figure("8 streams: peer, CPU", "audio s/CPU s", [7.0]),
            Figure("start: ours, ready", "s", [0.5]),
        ],
        console,
    )
    text = console.export_text()
    assert "8 streams" in text
    assert "4 (3-5)" in text
    assert text.index("8 streams") < text.index("7") < text.index("start") < text.index("0.5")


@pytest.mark.live
@pytest.mark.slow
def test_the_quick_comparison_measures_all_parts(tmp_path: Path) -> None:
    assert main(["--quick", "--streams", "2", "--results", str(tmp_path)]) == 0
    document: dict[str, Any] = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))
    figures = {figure["name"]: figure["median"] for figure in document["figures"]}
    sides = ("ours", "sherpa-onnx fp32", "sherpa-onnx int8")
    for side in sides:
        assert figures[f"2 streams: {side}"] > 0
        assert figures[f"paced, 2 streams, posts of 0.16 s: {side}, latency p95"] > 0
        assert figures[f"start: {side}, PSS"] > 10
    assert document["configuration"]["texts"]["word error rate from ours, %"][sides[1]] < 2
