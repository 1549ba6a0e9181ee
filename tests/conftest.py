"""What the tests share: the demo checkpoint, its recordings and one live server a session."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from oasr_backend.serve.process import TritonServer, local_settings

ROOT = Path(__file__).resolve().parent.parent
MODEL_REPOSITORY = ROOT / "model_repository"
DEMO_DIR = MODEL_REPOSITORY / "oasr_streaming" / "demo_en"
GOLDEN_DIR = ROOT / "tests" / "golden"


@dataclass(frozen=True)
class Clip:
    """One recording of the demo test set; `wenet_text` is WeNet's own streaming output."""

    path: Path
    text: str
    wenet_text: str
    seconds: float


def read_clips(folder: Path) -> list[Clip]:
    entries = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return [
        Clip(
            path=folder / (entry.get("audio") or entry["wav"]),
            text=entry["text"],
            # WeNet writes a second space for a mark before a marked unit; the product has one.
            wenet_text=" ".join(entry["wenet_chunk16_left4"].split()),
            seconds=entry["seconds"],
        )
        for entry in entries
    ]


@dataclass(frozen=True)
class LiveServer:
    server: TritonServer
    model_name: str = "oasr_streaming"

    @property
    def http_url(self) -> str:
        return self.server.http_url

    @property
    def grpc_url(self) -> str:
        return self.server.grpc_url

    @property
    def metrics_url(self) -> str:
        return self.server.metrics_url


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    return DEMO_DIR


@pytest.fixture(scope="session")
def clips() -> list[Clip]:
    """The ten short recordings of the test set."""
    return read_clips(DEMO_DIR / "testset")


@pytest.fixture(scope="session")
def all_clips() -> list[Clip]:
    """All seventy recordings."""
    return read_clips(DEMO_DIR / "eval") + read_clips(DEMO_DIR / "testset")


@pytest.fixture(scope="session")
def live_server() -> Iterator[LiveServer]:
    """A real tritonserver with the shipped model repository."""
    with TritonServer(local_settings(MODEL_REPOSITORY)) as server:
        server.wait_ready(180)
        yield LiveServer(server)


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A shell that runs the tests in the background ignores SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
