"""The command line of the load."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load.run import LoadSettings, derive_expected, run_load
from benchmarks.load.search import Limits, find_max
from benchmarks.load.utterances import Utterance, cut, noise, read_folder, with_expected
from benchmarks.load.worker import LoadError

DEFAULT_AUDIO = (
    Path(__file__).resolve().parents[2] / "model_repository/oasr_streaming/demo_en/testset"
)
_NOISE_COUNT = 16
SOLO = "solo"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    _add_server_options(parser)
    parser.add_argument("--streams", type=int, default=100, help="streams held at once")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the measurement")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--channels", type=int, default=4, help="connections per process")
    parser.add_argument(
        "--streaming", action="store_true", help="one ModelStreamInfer call per stream, not unary"
    )
    parser.add_argument("--chunk-ms", type=float, default=640.0)
    parser.add_argument("--dtype", choices=("pcm16", "fp32"), default="pcm16")
    parser.add_argument(
        "--stagger",
        nargs="?",
        type=float,
        const=5.0,
        default=0.0,
        metavar="SECONDS",
        help="spread the starts over so long (5 when not given); without it all send together",
    )
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before measuring")
    parser.add_argument(
        "--deadline", type=float, default=30.0, help="of a request and of connecting, in seconds"
    )
    _add_audio_options(parser)
    parser.add_argument("--find-max", action="store_true", help="search the largest --streams")
    parser.add_argument("--p95-ms", type=float, default=150.0, help="the limit of --find-max")
    parser.add_argument("--max-streams", type=int, default=20_000, help="--find-max stops there")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC host:port")
    parser.add_argument(
        "--metrics-url", help="default: port 8002 of the same host, /metrics; 'none': do not ask"
    )
    parser.add_argument("--model", default="oasr_streaming")


def _add_audio_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--audio", type=Path, help="folder of 16 kHz mono WAVs")
    parser.add_argument(
        "--noise", type=float, metavar="SECONDS", help="noise of that length instead of speech"
    )
    parser.add_argument(
        "--expect",
        metavar="solo|FILE",
        help="check the texts: against one stream alone, or a JSON file {wav name: text}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: no errors and no wrong texts (with --find-max: some number held)."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = build_parser().parse_args(arguments)
    try:
        report, is_good = _measure(options)
    except (LoadError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if is_good else 1


def _measure(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    settings = _settings(options, options.streams)
    utterances = load_utterances(options, settings)
    if not options.find_max:
        report = run_load(settings, utterances)
        print(render(report))
        return report, not report["errors"] and not report["texts"]["wrong"]

    def run(num_streams: int) -> dict[str, Any]:
        one = run_load(_settings(options, num_streams), utterances)
        print(render(one), flush=True)
        return one

    most, reports = find_max(
        run, Limits(options.p95_ms), first=options.streams, ceiling=options.max_streams
    )
    print(f"largest number of streams with final p95 <= {options.p95_ms:g} ms: {most}")
    found = {"kind": "find_max", "p95_ms": options.p95_ms, "max_streams": most, "runs": reports}
    return found, most > 0


def load_utterances(options: argparse.Namespace, settings: LoadSettings) -> Sequence[Utterance]:
    if options.noise is not None:
        recordings = noise(count=_NOISE_COUNT, seconds=options.noise)
    else:
        recordings = read_folder(options.audio or DEFAULT_AUDIO)
    utterances = [cut(one, chunk_ms=options.chunk_ms, dtype=options.dtype) for one in recordings]
    if options.expect is None:
        return utterances
    if options.expect == SOLO:
        return with_expected(utterances, derive_expected(settings, utterances))
    texts = json.loads(Path(options.expect).read_text(encoding="utf-8"))
    return with_expected(utterances, texts)


def _settings(options: argparse.Namespace, num_streams: int) -> LoadSettings:
    host = options.url.rsplit(":", 1)[0]
    metrics_url = options.metrics_url or f"http://{host}:8002/metrics"
    return LoadSettings(
        url=options.url,
        metrics_url=None if metrics_url == "none" else metrics_url,
        model_name=options.model,
        num_streams=num_streams,
        seconds=options.seconds,
        num_processes=options.processes,
        channels_per_process=options.channels,
        ramp_s=options.stagger,
        settle_s=options.settle,
        deadline_s=options.deadline,
        is_streaming=options.streaming,
    )


def render(report: dict[str, Any]) -> str:
    """A few lines for a reader at a terminal."""
    throughput, client, server = report["throughput"], report["client"], report["server"]
    lines = [
        f"{report['streams']} streams, {throughput['requests_per_s']:g} requests/s, audio "
        f"{throughput['reached_audio_s_per_s']:g} of {throughput['intended_audio_s_per_s']:g} s/s"
    ]
    rows = {**report["latency_ms"], "client's own slip": client["schedule_slip_ms"]}
    lines += [f"  {name:20} {_percentiles(row)}" for name, row in rows.items()]
    texts = report["texts"]
    lines.append(
        f"  errors {report['errors'] or 0}; texts {texts['finished']}, {_comparison(texts)}; "
        f"client {client['cpu_cores_used']} cores, {client['cpu_us_per_request']} us/request"
    )
    width = server["step_width"]
    mean = width and f"{width['mean']:.1f}"
    lines.append(
        f"  server: step width {mean}, requests/execution {server['requests_per_execution']}"
    )
    return "\n".join(lines)


def _comparison(texts: dict[str, Any]) -> str:
    if not texts["compared"]:
        return "none compared (see --expect)"
    return f"{texts['wrong']} wrong of {texts['compared']} compared"


def _percentiles(row: dict[str, float]) -> str:
    if not row["count"]:
        return "none"
    shown = " ".join(f"{name} {row[name]:8.1f}" for name in ("p50", "p90", "p95", "p99", "max"))
    return f"ms {shown}  (n={row['count']:.0f})"
