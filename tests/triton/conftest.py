"""What the live tests share: readers of the test set and a server for other settings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from oasr_backend.serve.process import TritonServer, local_settings
from tests.conftest import Clip, LiveServer
from tests.guards import GUARD_S
from tests.triton.variants import VariantServer
from tests.triton.wire import Wire

Pcm16 = npt.NDArray[np.int16]


@pytest.fixture(scope="session")
def recordings(clips: list[Clip]) -> list[Pcm16]:
    """The ten short clips as 16-bit samples, shortest first."""
    found = [soundfile.read(clip.path, dtype="int16")[0] for clip in clips]
    return sorted(found, key=len)


@pytest.fixture(scope="session")
def expected(live_server: LiveServer, recordings: list[Pcm16]) -> list[str]:
    """Each clip's final text when it comes in one request."""
    with Wire(live_server.server, live_server.model_name) as wire:
        return [wire.send(1 + i, pcm, "SE") for i, pcm in enumerate(recordings)]


@pytest.fixture(scope="session")
def variant_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VariantServer]:
    repository = tmp_path_factory.mktemp("variants")
    settings = local_settings(repository, extra_flags=("--model-control-mode=explicit",))
    with TritonServer(settings) as server:
        server.wait_ready(GUARD_S)
        yield VariantServer(server, repository)
