from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from benchmarks import options, perf_input, read_arpa, run
from benchmarks.dense_conformer import DenseConformer, dense_log_probs
from benchmarks.perf_analyzer import Load, run_load
from benchmarks.report import Figure, Report, alternating_ms
from benchmarks.workload import CHUNK_S, CHUNK_SAMPLES, CHUNKS_PER_UTTERANCE, utterances
from oasr_backend.config import ServingConfig
from oasr_backend.parity import stream_log_probs
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from tests.conftest import DEMO_DIR, GOLDEN_DIR, LiveServer
from tests.same_results import TOLERANCE

SETTINGS = [(16, -1), (16, 4), (16, 0), (8, 4), (4, 0)]


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    config = ServingConfig.of(max_streams=options.STREAMS)
    return load_engine(DEMO_DIR, config, device="cpu")


def run_quickly(name: str, results: Path) -> None:
    flags = ["--quick", "--threads", "1", "--results", str(results)]
    assert run.main(["--only", name, *flags]) == 0


def read_result(folder: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("checkpoint", ["wenet_small", "wenet_bn_k31"])
@pytest.mark.parametrize(("chunk_size", "num_left_chunks"), SETTINGS)
def test_the_dense_conformer_and_the_served_path_give_the_same_log_probs(
    checkpoint: str, chunk_size: int, num_left_chunks: int
) -> None:
    directory = GOLDEN_DIR / checkpoint
    feats_TF = np.load(directory / "expected.npz")["feats"]
    left_frames = num_left_chunks * chunk_size
    dense = DenseConformer(directory, num_left_frames=left_frames)
    dense_TV = dense_log_probs(dense, torch.from_numpy(feats_TF), chunk_size=chunk_size)
    served_TV = stream_log_probs(
        directory, feats_TF, chunk_size=chunk_size, num_left_chunks=num_left_chunks
    )
    np.testing.assert_allclose(served_TV, dense_TV.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("parameters", options.OPTION_SETS.values(), ids=options.OPTION_SETS)
def test_the_cost_of_options_is_that_of_streams_which_ask_for_them(
    parameters: dict[str, Any], engine: Engine
) -> None:
    audio = utterances(quick=True)
    loop = options.OptionLoop(engine, audio, parameters)
    loop.round()
    streams = list(engine.streams)
    engine.close()
    assert streams
    for stream in streams:
        assert {name: getattr(stream.options, name) for name in parameters} == parameters


def test_a_result_holds_what_is_needed_to_judge_it(tmp_path: Path) -> None:
    figure = Figure("speed", "audio s/s", [3.0, 1.0, 8.0], target=4.0)
    Report("example", {"streams": 2}, [figure]).write(tmp_path)
    document = read_result(tmp_path, "example")
    assert set(document) == {"name", "commit", "date", "machine", "configuration", "figures"}
    assert {"cpu", "cores", "gpus", "torch"} <= set(document["machine"])
    (written,) = document["figures"]
    assert (written["median"], written["min"], written["max"]) == (3.0, 1.0, 8.0)
    assert not figure.is_met


def test_ways_take_turns_and_the_warm_up_is_not_counted() -> None:
    turns: list[str] = []

    def way(name: str, seconds: float) -> float:
        turns.append(name)
        return seconds * len(turns)

    times_ms = alternating_ms(
        {"a": lambda: way("a", 1.0), "b": lambda: way("b", 0.1)},
        repeats=2,
        warm_up_rounds=1,
        prepare=lambda: turns.append("prepare"),
    )
    assert turns == ["prepare", "a", "b"] * 3
    assert times_ms["a"] == pytest.approx([5000.0, 8000.0])
    assert times_ms["b"] == pytest.approx([600.0, 900.0])


@pytest.mark.parametrize("name", ["engine", "host", "baseline"])
def test_a_quick_benchmark_writes_its_result(name: str, tmp_path: Path) -> None:
    run_quickly(name, tmp_path)
    document = read_result(tmp_path, name)
    assert all(figure["median"] > 0 for figure in document["figures"])


@pytest.mark.live
def test_the_quick_server_benchmark_meets_no_error_and_gets_every_stream_back(
    tmp_path: Path,
) -> None:
    run_quickly("server", tmp_path)
    names = [figure["name"] for figure in read_result(tmp_path, "server")["figures"]]
    assert {"closed loop: latency p99", "paced: latency p99"} <= set(names)


@pytest.mark.parametrize("chunk_s", [None, CHUNK_S], ids=["closed loop", "paced"])
def test_perf_analyzer_meets_no_error_on_the_shipped_model(
    chunk_s: float | None, live_server: LiveServer, tmp_path: Path
) -> None:
    input_data = tmp_path / "input.json"
    perf_input.write_input(input_data, utterances(quick=True), pcm16=True)
    load = Load(num_streams=4, seconds=0.7, chunk_s=chunk_s)
    outcome = run_load(live_server.grpc_url, live_server.model_name, load, input_data=input_data)
    assert outcome.num_errors == 0
    assert outcome.num_requests > 4
    assert outcome.latency_ms[50] > 0


@pytest.mark.parametrize(("name", "dtype"), [("WAV", "<f4"), ("PCM16", "<i2")])
def test_every_step_of_the_input_file_names_its_samples_and_their_shape(
    name: str, dtype: str, tmp_path: Path
) -> None:
    samples_S = (np.arange(25_000) % 200 - 100).astype(np.float32) / 128
    soundfile.write(tmp_path / "one.wav", samples_S, 16_000, subtype="FLOAT")
    flags = ["--pcm16"] if name == "PCM16" else []
    perf_input.main([str(tmp_path / "one.wav"), "-o", str(tmp_path / "out.json"), *flags])
    (sequence,) = json.loads((tmp_path / "out.json").read_text())["data"]
    assert [step[name]["shape"] for step in sequence] == [[10_240], [10_240], [4_520]]
    content = b"".join(base64.b64decode(step[name]["content"]["b64"]) for step in sequence)
    scale = 1 if name == "WAV" else 32768
    np.testing.assert_array_equal(np.frombuffer(content, dtype), samples_S * scale)


def test_an_input_file_without_audio_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a chunk"):
        perf_input.write_input(tmp_path / "out.json", [[]])


def test_utterances_are_equal_in_length_and_not_silent() -> None:
    audio = utterances(quick=True)
    assert {np.shape(chunks) for chunks in audio} == {(CHUNKS_PER_UTTERANCE, CHUNK_SAMPLES)}
    assert all(np.abs(chunks).max() > 0.05 for chunks in audio)


def test_reading_an_ngram_model_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    symbols = ["<blank>", "<unk>", *(f"u{unit}" for unit in range(98))]
    read_arpa.write_arpa(tmp_path / "lm.arpa", 3000, symbols)
    report = read_arpa.measure(tmp_path / "lm.arpa", symbols, repeats=1)
    assert report.figure("reading, of the processor").median > 0
    assert 8 * 2500 < report.figure("tables").median * 2**20 < 30 * 3000
