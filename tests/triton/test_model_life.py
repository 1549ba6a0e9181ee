"""A model instance loads, fails, unloads and stops on real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from benchmarks.chaos.health import stub_processes
from oasr_backend.serve.group import dead_stubs, running_in_group
from oasr_backend.serve.process import TritonServer, local_settings
from oasr_backend.serve.shm import leftover_regions
from tests.conftest import MODEL_REPOSITORY
from tests.engine_helpers import STRIDE_SAMPLES
from tests.guards import GUARD_S, wait_until
from tests.triton.conftest import Pcm16
from tests.triton.processes import newest_stub
from tests.triton.variants import GOLDEN, LoadedModel, Variant, VariantServer
from tests.triton.wire import (
    AsyncWire,
    Samples,
    audio,
    run_async,
    sequence,
    status_of,
    text_of,
)

FAULTY_MODEL = Path(__file__).parent / "faulty_model.py"
STEP_S = 0.6
#: Steps of one request, enough that it is in hand when the next round of metrics tells of it.
SEVERAL = 12


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (Variant("bad_key", {"num_left_chunk": "4"}), ["num_left_chunk", "num_left_chunks"]),
        (Variant("bad_value", {"chunk_size": "wide"}), ["chunk_size='wide'", "integer"]),
        (
            Variant("bad_idle", {"stream_idle_timeout_s": "60"}, checkpoint_dir=GOLDEN),
            ["stream_idle_timeout_s=60", "max_sequence_idle_microseconds", "raise"],
        ),
        (
            Variant("bad_limit", checkpoint_dir=GOLDEN, max_candidates=256),
            ["max_candidate_sequences=256", "max_streams=256"],
        ),
        (
            Variant("bad_checkpoint", checkpoint_dir=Path("/nowhere")),
            ["/nowhere is no checkpoint", "checkpoint_dir"],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Variant) else "",
)
def test_a_configuration_that_cannot_work_is_refused_at_load(
    variant_server: VariantServer, variant: Variant, words: list[str]
) -> None:
    dead = set(dead_stubs(variant_server.server.pid))
    with pytest.raises(InferenceServerException) as caught:
        variant_server.load(variant)
    for word in words:
        assert word in str(caught.value.message())
    assert set(dead_stubs(variant_server.server.pid)) <= dead, "oasr-serve would end the server"


def test_a_reload_forgets_its_streams_and_says_so(
    variant_server: VariantServer, recordings: list[Pcm16]
) -> None:
    variant = Variant("reloaded", checkpoint_dir=GOLDEN)
    with variant_server.loaded(variant) as model, model.wire() as wire:
        whole = wire.send(1, recordings[0], "SE")
        wire.send(2, recordings[0], "S")
        variant_server.unload(model.name)
        with pytest.raises(InferenceServerException) as gone:
            wire.send(2, recordings[0])
        assert status_of(gone.value) in ("NOT_FOUND", "UNAVAILABLE")
        wait_until(lambda: not is_ready(model), what="the model is unloaded")
        variant_server.load(variant)
        for flags in ("", "E"):
            with pytest.raises(InferenceServerException, match="START") as lost:
                wire.send(2, recordings[0], flags)
            assert status_of(lost.value) == "INVALID_ARGUMENT"
        assert wire.send(2, recordings[0], "SE") == whole


def is_ready(model: LoadedModel) -> bool:
    with tritonclient.grpc.InferenceServerClient(model.server.grpc_url) as client:
        return bool(client.is_model_ready(model.name))


@pytest.fixture(scope="module", name="capped")
def _capped(variant_server: VariantServer) -> Iterator[LoadedModel]:
    settings = {"num_left_chunks": "-1", "max_blocks_per_seq": "4"}
    with variant_server.loaded(Variant("capped", settings, checkpoint_dir=GOLDEN)) as model:
        yield model


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_unlimited_history_ends_with_its_text_and_a_clear_error(
    capped: LoadedModel, recordings: list[Pcm16], protocol: str
) -> None:
    with capped.wire(protocol) as wire:
        document = wire.document("long", np.tile(recordings[0], 3), "S")
        assert document["finish_reason"] == "length"
        assert document["is_final"]
        assert document["num_frames"] == 4 * 16
        assert document["text"]
        for flags in ("", "E"):
            with pytest.raises(InferenceServerException, match="finish_reason 'length'") as over:
                wire.send("long", recordings[0], flags)
            assert status_of(over.value) in ("INVALID_ARGUMENT", "400")
            assert "send START" in str(over.value.message())
        assert wire.send("long", recordings[0][:16000], "SE")


@pytest.fixture(scope="module", name="slow")
def _slow(variant_server: VariantServer) -> Iterator[LoadedModel]:
    settings = {"debug_slow_step_ms": str(round(STEP_S * 1000)), "max_step_streams": "4"}
    with variant_server.loaded(Variant("slow", settings, checkpoint_dir=GOLDEN)) as model:
        yield model


def several_steps(recordings: list[Pcm16]) -> Pcm16:
    return np.resize(recordings[0], SEVERAL * STRIDE_SAMPLES)


def test_stalled_steps_cost_no_stream_its_place(slow: LoadedModel, recordings: list[Pcm16]) -> None:
    """Eight streams in steps of four, each step slower than the audio it decodes is long."""

    async def act(wire: AsyncWire) -> list[str]:
        pieces = np.array_split(recordings[0][:20000], 2)
        return await asyncio.gather(*(wire.stream(f"stalled {i}", pieces) for i in range(8)))

    texts = run_async(slow.server, slow.name, act)
    assert len(set(texts)) == 1


def test_many_small_chunks_queued_at_once_are_all_answered_in_order(
    slow: LoadedModel, recordings: list[Pcm16]
) -> None:
    pieces = np.array_split(recordings[0][:30000], 100)
    answers: list[str] = []
    errors: list[object] = []

    def note(result: object, error: object) -> None:
        if error is not None:
            errors.append(error)
        else:
            answers.append(result.as_numpy("TRANSCRIPTS")[0].decode())  # type: ignore[attr-defined]

    with tritonclient.grpc.InferenceServerClient(slow.server.grpc_url) as client:
        client.start_stream(note)
        for index, piece in enumerate(pieces):
            flags = ("S" if index == 0 else "") + ("E" if index == len(pieces) - 1 else "")
            client.async_stream_infer(
                slow.name, audio(tritonclient.grpc, piece), **sequence("queued", flags)
            )
        wait_until(lambda: len(answers) + len(errors) == len(pieces), what="all are answered")
        client.stop_stream()
    assert errors == []
    assert [len(text) for text in answers] == sorted(len(text) for text in answers)
    with slow.wire() as wire:
        assert answers[-1] == wire.send("whole", recordings[0][:30000], "SE")


def test_a_refusal_waits_for_no_more_than_the_step_in_progress(
    slow: LoadedModel, recordings: list[Pcm16]
) -> None:
    async def act(wire: AsyncWire) -> tuple[float, float]:
        begin_s = time.perf_counter()
        busy = asyncio.ensure_future(wire.send("busy", several_steps(recordings), "SE"))
        await asyncio.sleep(0.1)
        sent_s = time.perf_counter()
        with pytest.raises(InferenceServerException, match="nan"):
            await wire.send("refused", np.array([np.nan], np.float32), "SE")
        refusal_s = time.perf_counter() - sent_s
        assert not busy.done()
        await busy
        return refusal_s, time.perf_counter() - begin_s

    refusal_s, all_steps_s = run_async(slow.server, slow.name, act)
    # An `execute` takes three of the steps; the rest is the machine's.
    assert refusal_s < 5 / SEVERAL * all_steps_s


@pytest.mark.parametrize("flags", ["S", ""])
def test_a_call_cancelled_after_its_first_step_is_served_and_its_stream_goes_on(
    slow: LoadedModel, recordings: list[Pcm16], flags: str
) -> None:
    first, second = several_steps(recordings), recordings[1]

    async def act(wire: AsyncWire) -> str:
        if not flags:
            await wire.send("taken back", first[:0], "S")
        await cancel_in_hand(slow, wire.send("taken back", first, flags))
        return await wire.send("taken back", second, "E")

    text = run_async(slow.server, slow.name, act)
    with slow.wire() as wire:
        assert text == wire.send("whole", np.append(first, second), "SE")


def test_an_end_cancelled_after_its_first_step_still_ends_its_stream(
    slow: LoadedModel, recordings: list[Pcm16]
) -> None:
    async def act(wire: AsyncWire) -> None:
        await cancel_in_hand(slow, wire.send("hung up", several_steps(recordings), "SE"))

    run_async(slow.server, slow.name, act)
    # The stream's idle limit of 90 s is far away.
    wait_until(
        lambda: slow.metrics()["oasr_active_streams"] == 0,
        what="the stream has ended without its caller",
    )


async def cancel_in_hand(model: LoadedModel, coroutine: Coroutine[Any, Any, str]) -> None:
    """Cancels a call of several steps once the server says that it has the audio."""
    before = model.metrics()["oasr_audio_seconds_total"]
    call = asyncio.ensure_future(coroutine)
    while model.metrics()["oasr_audio_seconds_total"] == before:
        await asyncio.sleep(0.05)
    assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.fixture(name="faulty")
def _faulty(variant_server: VariantServer) -> Iterator[LoadedModel]:
    variant = Variant("faulty", checkpoint_dir=GOLDEN, model_py=FAULTY_MODEL)
    with variant_server.loaded(variant) as model:
        yield model


def with_mark(pcm: Pcm16, mark: float, *, window: int = 0) -> Samples:
    samples = pcm.astype(np.float32) / np.float32(32768)
    samples[window * STRIDE_SAMPLES] = mark
    return samples


def test_a_fault_in_the_step_ends_its_streams_and_a_lost_device_everything(
    faulty: LoadedModel, recordings: list[Pcm16]
) -> None:
    with faulty.wire() as wire:
        whole = wire.send("reference", recordings[0], "SE")
        wire.send("open", recordings[0][:30000], "S")
        with pytest.raises(InferenceServerException, match="injected into the step") as failed:
            wire.send("struck", with_mark(recordings[1], 1.5), "S")
        assert status_of(failed.value) == "INTERNAL"
        assert "send START" in str(failed.value.message())
        with pytest.raises(InferenceServerException, match="send START"):
            wire.send("struck", recordings[1])
        assert wire.send("open", recordings[0][30000:], "E") == whole, "nobody else is hurt"

        wire.send("open", recordings[0], "S")
        with pytest.raises(InferenceServerException, match="injected illegal memory") as lost:
            wire.send("fatal", with_mark(recordings[1], 1.75), "S")
        assert status_of(lost.value) == "UNAVAILABLE"
        for stream_id, flags in (("open", ""), ("new", "SE")):
            with pytest.raises(InferenceServerException, match="restarted") as refused:
                wire.send(stream_id, recordings[0], flags)
            assert status_of(refused.value) == "UNAVAILABLE"
    wait_until(lambda: faulty.metrics().get("oasr_healthy") == 0, what="the gauge tells it")
    wait_until(
        lambda: faulty.metrics().get('oasr_finished_total{reason="failed"}', 0) >= 2,
        what="the ends are counted",
    )


def test_a_step_that_raises_in_the_backlog_is_an_answer_and_the_backlog_goes_on(
    faulty: LoadedModel, recordings: list[Pcm16]
) -> None:
    minute = np.resize(recordings[0], 60 * 16000)
    with faulty.wire() as wire:
        whole = wire.send("reference", minute, "SE")
        with pytest.raises(InferenceServerException, match="injected into the engine") as failed:
            wire.send("struck", with_mark(minute, 1.25, window=60), "S")
        assert status_of(failed.value) == "INTERNAL"
        assert wire.send("next", minute, "SE") == whole
        assert wire.send("struck", minute, "SE") == whole


def test_a_stub_that_is_killed_is_an_error_and_never_a_hang(
    variant_server: VariantServer, recordings: list[Pcm16]
) -> None:
    variant = Variant("doomed", checkpoint_dir=GOLDEN)
    with variant_server.loaded(variant) as model, model.wire() as wire:
        wire.send(1, recordings[0], "S")
        stub = newest_stub(model.server)
        os.kill(stub, signal.SIGKILL)
        for stream_id, flags in ((1, ""), (2, "S")):
            with pytest.raises(InferenceServerException):
                wire.send(stream_id, recordings[0], flags)
        assert stub in dead_stubs(variant_server.server.pid)


def test_a_stub_that_was_killed_counts_as_dead_until_its_model_is_unloaded(
    variant_server: VariantServer,
) -> None:
    with variant_server.loaded(Variant("buried", checkpoint_dir=GOLDEN)) as model:
        stub = newest_stub(model.server)
        assert stub not in dead_stubs(model.server.pid)
        os.kill(stub, signal.SIGKILL)
        wait_until(
            lambda: dead_stubs(model.server.pid).get(stub) == -signal.SIGKILL,
            what="the stub is dead",
        )
    wait_until(lambda: stub not in dead_stubs(model.server.pid), what="it is collected")


def test_the_heartbeat_of_an_unloaded_model_is_0_and_so_no_hang(
    variant_server: VariantServer,
) -> None:
    with variant_server.loaded(Variant("gone", checkpoint_dir=GOLDEN)) as model:
        assert model.metrics()["oasr_heartbeat_seconds"] > 0
    wait_until(
        lambda: model.metrics()["oasr_heartbeat_seconds"] == 0,
        what="its heartbeat has ended",
    )


def test_the_heartbeat_of_a_model_that_is_loaded_anew_goes_on(
    variant_server: VariantServer,
) -> None:
    """The new one is there before the old one goes."""
    variant = Variant("anew", checkpoint_dir=GOLDEN)
    with variant_server.loaded(variant) as model:
        old = newest_stub(model.server)
        variant_server.load(replace(variant, more="# changed"))
        wait_until(lambda: old not in stub_processes(model.server), what="the old one ended")
        seen = model.metrics()["oasr_heartbeat_seconds"]
        wait_until(lambda: model.metrics()["oasr_heartbeat_seconds"] > seen, what="it beats")


def test_a_server_that_stops_answers_what_it_holds_and_leaves_nothing_behind(
    recordings: list[Pcm16],
) -> None:
    overrides = {"debug_slow_step_ms": "300", "checkpoint_dir": str(GOLDEN)}
    server = TritonServer(local_settings(MODEL_REPOSITORY, overrides=overrides))
    with server:
        server.wait_ready(GUARD_S)
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        outcomes: list[object] = []
        for stream_id in range(1, 9):
            client.async_infer(
                "oasr_streaming",
                audio(tritonclient.grpc, np.tile(recordings[0], 2)),
                lambda result, error: outcomes.append(error or text_of(result)),
                **sequence(stream_id, "S"),
            )
        # The server holds them, and its next answer is some seconds of slow steps away.
        held = LoadedModel(server, "oasr_streaming")
        wait_until(lambda: held.metrics().get("oasr_active_streams") == 8, what="all are open")
        assert outcomes == []
        server.stop()
        # No caller sends END: the stop cuts Triton's wait for it short, or else its time-out does.
        assert server.exit_status in (-signal.SIGKILL, 1)
        wait_until(lambda: len(outcomes) == 8, what="every call has returned")
        assert all(isinstance(outcome, str) and outcome for outcome in outcomes)
        client.close()
    assert running_in_group(server.pid) == []
    assert leftover_regions(server.settings.shm_prefix) == []
