"""Compares the project with sherpa-onnx: one machine, one run, the same weights, audio and chunks.

    python -m benchmarks.peers [--only throughput|paced|start] [--quick] [--rounds N] ...

* throughput: both in process, a closed loop, by turns (throughput.py)
* paced: live callers through each one's own server, latency and processor time (paced.py)
* start: seconds until a server is ready, and its memory (start.py)

The peer reads an export of the loaded checkpoint (export.py), in fp32 and in int8, and is given the
threads, processes and flags that suit it best. Before anything is measured the texts of both are
compared on the demo's recordings (agreement.py).

Not measured: GPUs, other checkpoints than the demo's, transducers, networks between machines, and
accuracy beyond the agreement of the texts. Endpoints are off and the search is greedy for both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.peers import agreement, paced, start, table, throughput
from benchmarks.peers.choices import PARTS, Choices
from benchmarks.peers.export import ExportedModel, export_checkpoint
from benchmarks.peers.packages import MissingPackageError, require, server_binary
from benchmarks.peers.servers import RunningServer, Server, our_server, peer_server
from benchmarks.report import RESULTS_DIRECTORY, Figure, Report
from benchmarks.workload import CHUNK_S, CHUNKS_PER_UTTERANCE, DEMO_DIRECTORY

_PACKAGES = ("sherpa-onnx", "sherpa-onnx-bin", "onnx", "onnxruntime")


def main(arguments: list[str] | None = None) -> int:
    """Returns 2 when a package of the peer is missing."""
    choices, results = _parse(arguments)
    console = Console()
    try:
        for name in ("onnx", "onnxruntime", "sherpa_onnx", "aiohttp"):
            require(name)
        server_binary()
    except MissingPackageError as error:
        console.print(f"[red]{error}")
        return 2
    with tempfile.TemporaryDirectory(prefix="oasr-peers-") as folder:
        report = compare(choices, Path(folder), console)
    table.show(report.figures, console)
    console.print(f"[dim]written to {report.write(results)}")
    return 0


def compare(choices: Choices, folder: Path, console: Console) -> Report:
    """All parts that were chosen. The export lies in `folder`."""
    console.print("[dim]exporting the checkpoint, comparing texts ...")
    exported = export_checkpoint(DEMO_DIRECTORY, folder)
    configuration = {**_configuration(choices), "texts": agreement.measure(exported, choices)}
    figures: list[Figure] = []
    if "throughput" in choices.parts:
        console.print("[dim]measuring throughput in process ...")
        outcome = throughput.measure(exported, choices)
        figures += outcome.figures
        configuration["arrangements"] = outcome.arrangements
    servers = _servers(exported)
    configuration["commands"] = {one.name: _shown(one, folder) for one in servers}
    if "paced" in choices.parts:
        console.print("[dim]measuring paced streams through the servers ...")
        figures += _measure_paced(servers, exported, choices)
    if "start" in choices.parts:
        console.print("[dim]measuring starts of the servers ...")
        figures += start.measure(servers, choices)
    name = "peers" if choices.parts == PARTS else "_".join(("peers", *choices.parts))
    return Report(name, configuration, figures)


def _servers(exported: ExportedModel) -> list[Server]:
    peers = [peer_server(name, exported, model) for name, model in exported.models().items()]
    return [our_server(exported), *peers]


def _measure_paced(
    servers: list[Server], exported: ExportedModel, choices: Choices
) -> list[Figure]:
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(RunningServer(server)) for server in servers]
        for one in running:
            one.wait_ready()
        return paced.measure(running, exported, choices)


def _shown(server: Server, folder: Path) -> str:
    """The command without what differs from run to run."""
    words = [word.replace(str(folder), "EXPORT") for word in server.command]
    words[0] = Path(words[0]).name
    places = ("--port", "--http-port", "--grpc-port", "--metrics-port", "--model-repository")
    return " ".join(word for word in words if word.partition("=")[0] not in places).replace(
        str(DEMO_DIRECTORY), DEMO_DIRECTORY.name
    )


def _configuration(choices: Choices) -> dict[str, Any]:
    return {
        "checkpoint": DEMO_DIRECTORY.name,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": _cpu_flags(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "chunk_s": CHUNK_S,
        "chunks_per_utterance": CHUNKS_PER_UTTERANCE,
        "streams": list(choices.streams),
        "rounds": choices.num_rounds,
        "turn_s": choices.turn_s,
        "paced_streams": list(choices.paced_streams),
        "paced_rounds": choices.num_paced_rounds,
        "posts_s": list(choices.posts_s),
        "speak_s": choices.speak_s,
    }


def _cpu_flags() -> list[str]:
    """Those instructions that matrix products use, if the processor has them."""
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    found = set(lines[0].split()) if lines else set()
    return [flag for flag in wanted if flag in found]


def _parse(arguments: list[str] | None) -> tuple[Choices, Path]:
    usual = Choices()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=PARTS, help="measure one part; its result has its name")
    parser.add_argument("--quick", action="store_true", help="prove that it runs")
    parser.add_argument("--streams", type=int, nargs="+", default=list(usual.streams),
                        help="numbers of streams in process")  # fmt: skip
    parser.add_argument("--paced-streams", type=int, nargs="+", default=list(usual.paced_streams),
                        help="numbers of streams through the servers")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=usual.rounds,
                        help="turns of each; a third as many for paced streams")  # fmt: skip
    parser.add_argument("--posts-s", type=float, nargs="+", default=list(usual.posts_s),
                        help="seconds of audio in a message of a paced stream")  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS_DIRECTORY)
    chosen = parser.parse_args(arguments)
    choices = Choices(
        parts=(chosen.only,) if chosen.only else PARTS,
        streams=tuple(chosen.streams),
        paced_streams=tuple(chosen.paced_streams),
        rounds=chosen.rounds,
        posts_s=tuple(chosen.posts_s),
    )
    return (choices.quick() if chosen.quick else replace(choices)), chosen.results


if __name__ == "__main__":
    raise SystemExit(main())
