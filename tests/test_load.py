"""The load tool: its requests, its clocks, its arithmetic, and a short run against the server."""

from __future__ import annotations

import json
import shutil
import wave
from array import array
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.load import wire
from benchmarks.load.cli import main
from benchmarks.load.prometheus import HistogramChange, Metrics, gain
from benchmarks.load.search import Limits, failures, find_max
from benchmarks.load.statistics import summary_ms
from benchmarks.load.utterances import Recording, cut, noise, read_folder, with_expected
from oasr_backend.serve.ports import find_free_ports
from tests.conftest import Clip
from tests.guards import GUARD_S

BEFORE = """
# TYPE oasr_step_width histogram
oasr_step_width_bucket{model="m",le="1"} 5
oasr_step_width_bucket{model="m",le="2"} 6
oasr_step_width_bucket{model="m",le="+Inf"} 6
oasr_step_width_sum{model="m"} 7
oasr_step_width_count{model="m"} 6
oasr_active_streams{model="m",version="1"} 3
"""
AFTER = """
oasr_step_width_bucket{model="m",le="1"} 5
oasr_step_width_bucket{model="m",le="2"} 8
oasr_step_width_bucket{model="m",le="+Inf"} 9
oasr_step_width_sum{model="m"} 16
oasr_step_width_count{model="m"} 9
oasr_rejected_total{reason="limit",model="m"} 4
oasr_rejected_total{reason="nan",model="m"} 2
"""


#: In seconds. A clip holds words enough to show a mix-up, and ends well within a short window.
LONGEST_SHORT_CLIP_S = 3.0


class Server(Protocol):
    grpc_url: str
    metrics_url: str


def recording(seconds: float) -> Recording:
    return Recording("a.wav", np.arange(round(seconds * 16_000), dtype=np.int16))


def report(**changes: Any) -> dict[str, Any]:
    """A run that holds, with the given figures changed."""
    figures = {"p95": 50.0, "count": 20, "reached": 10.0, "slip": 1.0, "wrong": 0, "errors": {}}
    figures |= changes
    return {
        "latency_ms": {"last_chunk_to_final": {"p95": figures["p95"], "count": figures["count"]}},
        "throughput": {"intended_audio_s_per_s": 10, "reached_audio_s_per_s": figures["reached"]},
        "errors": figures["errors"],
        "texts": {"wrong": figures["wrong"]},
        "client": {"schedule_slip_ms": {"p99": figures["slip"]}},
    }


@pytest.mark.parametrize("stream_id", [1 << 62, "caller-7"])
def test_joined_parts_are_one_request(stream_id: int | str) -> None:
    samples = np.array([1, -2, 3], dtype=np.int16)
    request = wire.head("m", stream_id, {"sample_rate": 8000}) + wire.START + wire.END
    message = service_pb2.ModelInferRequest.FromString(request + wire.body(samples, "pcm16"))
    slot = "int64_param" if isinstance(stream_id, int) else "string_param"
    assert getattr(message.parameters["sequence_id"], slot) == stream_id
    assert message.parameters["sequence_start"].bool_param
    assert message.parameters["sequence_end"].bool_param
    assert message.parameters["sample_rate"].int64_param == 8000
    assert (message.inputs[0].name, list(message.inputs[0].shape)) == ("PCM16", [1, 3])
    assert list(message.raw_input_contents) == [samples.tobytes()]


def test_the_text_of_an_answer_comes_without_its_length() -> None:
    text = "THÉ END".encode()
    answer = service_pb2.ModelInferResponse()
    answer.raw_output_contents.append(len(text).to_bytes(4, "little") + text)
    assert wire.text_of(answer.SerializeToString()) == "THÉ END"


def test_fp32_is_scaled_by_type_and_not_by_amplitude() -> None:
    samples = np.array([-32768, 0, 16384], dtype=np.int16)
    assert wire.to_dtype(samples, "fp32").tolist() == [-1.0, 0.0, 0.5]


def test_a_chunk_is_due_when_its_audio_is_complete() -> None:
    utterance = cut(recording(1.5), chunk_ms=640, dtype="pcm16")
    assert utterance.ready_s == pytest.approx((0.64, 1.28, 1.5))
    assert utterance.duration_s == pytest.approx(1.5)


def test_the_chunks_are_the_recording() -> None:
    original = recording(1.5)
    bodies = cut(original, chunk_ms=100, dtype="pcm16").bodies
    sent = [service_pb2.ModelInferRequest.FromString(one).raw_input_contents[0] for one in bodies]
    assert b"".join(sent) == original.samples_S.tobytes()


def test_an_empty_recording_still_has_a_chunk_to_end_with() -> None:
    assert len(cut(recording(0), chunk_ms=640, dtype="fp32").bodies) == 1


def test_expected_texts_go_by_name() -> None:
    (known,) = with_expected([cut(recording(1), chunk_ms=640, dtype="pcm16")], {"a.wav": "HI"})
    assert known.expected_text == "HI"


def test_noise_repeats() -> None:
    first, again = (noise(count=2, seconds=0.1) for _ in range(2))
    assert [one.samples_S.tolist() for one in first] == [one.samples_S.tolist() for one in again]


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.wav"):
        read_folder(tmp_path)


def test_a_recording_of_another_rate_is_refused(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(20))
    with pytest.raises(ValueError, match="8000"):
        read_folder(tmp_path)


def test_a_histogram_change_is_per_bucket() -> None:
    before, after = Metrics.parse(BEFORE), Metrics.parse(AFTER)
    change = HistogramChange.between(before, after, "oasr_step_width")
    assert change is not None
    assert change.counts == {"1": 0, "2": 2, "+Inf": 1}
    assert change.mean == 3.0


def test_a_bucket_read_before_a_narrower_one_never_counts_below_zero() -> None:
    lines = 'h_bucket{le="1"} 9\nh_bucket{le="2"} 7\nh_bucket{le="+Inf"} 10\nh_sum 30\nh_count 10'
    change = HistogramChange.between(Metrics.parse(""), Metrics.parse(lines), "h")
    assert change is not None
    assert change.counts == {"1": 9, "2": 0, "+Inf": 1}


def test_labels_are_added_up_or_told_apart() -> None:
    metrics = Metrics.parse(AFTER)
    assert metrics.total("oasr_rejected_total") == 6
    assert metrics.total("oasr_rejected_total", reason="nan") == 2
    assert metrics.by_label("oasr_rejected_total", "reason") == {"limit": 4, "nan": 2}


def test_an_unknown_metric_is_not_zero() -> None:
    before, after = Metrics.parse(BEFORE), Metrics.parse(AFTER)
    assert gain(before, after, "oasr_rejected_total") == 6
    assert gain(before, after, "oasr_conflicts_total") is None
    assert HistogramChange.between(before, after, "oasr_step_seconds") is None
    with pytest.raises(KeyError, match="oasr_conflicts_total"):
        after.total("oasr_conflicts_total")


def test_percentiles_are_in_milliseconds() -> None:
    summary = summary_ms(array("d", [index / 1000 for index in range(101)]))
    assert (summary["p50"], summary["p95"], summary["max"]) == (50.0, 95.0, 100.0)
    assert summary_ms(array("d")) == {"count": 0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"p95": 151.0}, "p95"),
        ({"count": 0}, "no utterance"),
        ({"errors": {"UNAVAILABLE": 1}}, "UNAVAILABLE"),
        ({"wrong": 1}, "wrong"),
        ({"reached": 9.0}, "90.0%"),
        ({"slip": 90.0}, "client"),
    ],
)
def test_a_run_that_does_not_hold_says_why(changes: dict[str, Any], reason: str) -> None:
    assert failures(report(), Limits(150.0)) == []
    (found,) = failures(report(**changes), Limits(150.0))
    assert reason in found


@pytest.mark.parametrize("limit", [1, 2, 37, 1000, 4097])
def test_the_search_finds_the_limit(limit: int) -> None:
    def run(num_streams: int) -> dict[str, Any]:
        return report(p95=100.0 if num_streams <= limit else 200.0)

    most, reports = find_max(run, Limits(150.0, tolerance=0.02), first=16, ceiling=20_000)
    assert limit * 0.97 <= most <= limit
    assert len(reports) < 25


def test_the_search_stops_at_the_ceiling_and_at_nothing() -> None:
    assert find_max(lambda _: report(), Limits(150.0), first=8, ceiling=20)[0] == 20
    assert find_max(lambda _: report(wrong=1), Limits(150.0), first=8, ceiling=20)[0] == 0


@pytest.mark.parametrize("more", [[], ["--streaming"]])
def test_paced_streams_are_measured(
    more: list[str], live_server: Server, clips: list[Clip], tmp_path: Path
) -> None:
    """The machine decides how much of the audio is reached, but the tool has to count it."""
    out = tmp_path / "load.json"
    short = [clip for clip in clips if clip.seconds < LONGEST_SHORT_CLIP_S]
    for clip in short:
        shutil.copy(clip.path, tmp_path)
    run = ["--streams", "3", "--processes", "2", "--seconds", "8", "--settle", "0.5"]
    run += ["--stagger", "1", "--audio", str(tmp_path), "--expect", "solo"]
    run += ["--deadline", str(GUARD_S)]
    server = ["--url", live_server.grpc_url, "--metrics-url", live_server.metrics_url]
    status = main([*server, *run, *more, "--json", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert status == 0
    assert found["texts"]["wrong"] == 0
    assert found["texts"]["compared"] == found["texts"]["finished"] >= 1
    assert found["latency_ms"]["last_chunk_to_final"]["count"] > 0
    # A scrape can fall between a histogram's count and its sum; then a few steps are missing.
    assert 0.8 < found["server"]["step_width"]["mean"] <= 3
    assert found["throughput"]["intended_audio_s_per_s"] == 3
    assert found["throughput"]["reached_audio_s_per_s"] > 0


@pytest.mark.parametrize("more", [[], ["--expect", "solo"]])
def test_a_missing_server_is_an_error_and_not_a_hang(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = find_free_ports(1)
    url = ["--url", f"127.0.0.1:{port}", "--metrics-url", "none", "--noise", "0.5"]
    assert main([*url, "--streams", "1", "--seconds", "1", "--deadline", "0.5", *more]) == 2
    assert "no server answers" in capsys.readouterr().err
