"""What the tests share: the demo checkpoint, its recordings and one live server a session.

It also sets what holds for every test: its markers, its time limit and its threads.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch

from oasr_backend.serve.process import TritonServer, local_settings
from tests.guards import GUARD_S
from tests.markers import automatic_marks

ROOT = Path(__file__).resolve().parent.parent
MODEL_REPOSITORY = ROOT / "model_repository"
DEMO_DIR = MODEL_REPOSITORY / "oasr_streaming" / "demo_en"
GOLDEN_DIR = ROOT / "tests" / "golden"

# Graphs that tests have made are kept from run to run, and apart from those of the user.
os.environ["XDG_CACHE_HOME"] = str(ROOT / ".cache")

# A busy machine makes an example slow to draw and slow to run, and neither is a fault.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in automatic_marks(item):
            item.add_marker(mark)


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
        server.wait_ready(GUARD_S)
        yield LiveServer(server)


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """The machine has two threads, and workers that run side by side share them."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    wanted = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(wanted) if wanted else max(1, 2 // num_workers))


@pytest.fixture(autouse=True)
def _only_live_tests_start_servers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("live") is None:
        monkeypatch.setattr(TritonServer, "start", _refuse_to_start)


def _refuse_to_start(_server: TritonServer) -> None:
    pytest.fail("this test starts a tritonserver; mark it with pytest.mark.live")


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A shell that runs the tests in the background ignores SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
