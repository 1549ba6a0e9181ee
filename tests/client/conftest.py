"""A real tritonserver with a model that counts samples and misbehaves when asked to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from oasr_backend.serve.process import TritonServer, local_settings
from tests.guards import GUARD_S

ECHO_REPOSITORY = Path(__file__).parent / "echo_repository"


@pytest.fixture(scope="session")
def echo_server() -> Iterator[TritonServer]:
    with TritonServer(local_settings(ECHO_REPOSITORY)) as server:
        server.wait_ready(GUARD_S)
        yield server


@pytest.fixture
def doomed_server() -> Iterator[TritonServer]:
    """A server of this test's own, to be killed."""
    with TritonServer(local_settings(ECHO_REPOSITORY)) as server:
        server.wait_ready(GUARD_S)
        yield server


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """1.5 s at 16 kHz."""
    path = tmp_path / "tone.wav"
    tone = 0.25 * np.sin(2 * np.pi * 440 * np.arange(24000) / 16000)
    soundfile.write(path, tone, 16000)
    return path
