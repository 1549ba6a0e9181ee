"""Two models of one repository under one `oasr-serve`: each has a checkpoint and settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from oasr_backend.config import ServingConfig
from oasr_backend.serve.ports import find_free_ports
from oasr_backend.streaming.assemble import load_engine
from tests.conftest import DEMO_DIR
from tests.engine_helpers import ask_one
from tests.guards import GUARD_S
from tests.triton.variants import GOLDEN, Variant
from tests.triton.wire import Samples, audio, sequence, text_of

OASR_SERVE = Path(sys.executable).parent / "oasr-serve"
SETTINGS = {
    "english": {"max_streams": 3, "num_left_chunks": 2},
    "golden": {"max_streams": 2, "num_left_chunks": 2, "chunk_size": 8},
}
CHECKPOINTS = {"english": DEMO_DIR, "golden": GOLDEN}


@pytest.fixture(name="url", scope="module")
def _url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server whose models differ by the command line alone."""
    repository = tmp_path_factory.mktemp("repository")
    for name in SETTINGS:
        Variant(name, {"device": "cpu"}).write(repository)
    ports = find_free_ports(3)
    flags = ("--http-port", "--grpc-port", "--metrics-port")
    command = [str(OASR_SERVE), "--model-repository", str(repository), "--host", "127.0.0.1"]
    command += [f"{flag}={port}" for flag, port in zip(flags, ports, strict=True)]
    # Each instance has a limit of its own.
    command += ["--instances", "1"]
    command += ["--checkpoint", f"golden:{GOLDEN}"]
    command += ["--set", "num_left_chunks=2", "--set", "max_streams=3"]
    command += ["--set", "golden:max_streams=2", "--set", "golden:chunk_size=8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready: ")
            yield f"127.0.0.1:{ports[1]}"
        finally:
            process.terminate()
            process.wait(GUARD_S)


def expected_text(name: str, samples: Samples) -> str:
    config = ServingConfig.of(**SETTINGS[name])
    result = ask_one(
        load_engine(CHECKPOINTS[name], config, device="cpu"),
        "a",
        samples.astype(np.float32) / np.float32(32768),
        flags="SE",
    )
    assert result.error is None
    return result.text


@pytest.mark.parametrize("name", SETTINGS)
def test_each_model_hears_with_its_own_checkpoint_and_settings(
    url: str, name: str, recordings: list[Samples]
) -> None:
    with tritonclient.grpc.InferenceServerClient(url) as client:
        found = client.infer(
            name,
            audio(tritonclient.grpc, recordings[0]),
            client_timeout=GUARD_S,
            **sequence(1, "SE"),
        )
    text = text_of(found)
    assert text
    assert text == expected_text(name, recordings[0])


@pytest.mark.parametrize("name", SETTINGS)
def test_each_model_has_its_own_limit(url: str, name: str, recordings: list[Samples]) -> None:
    tensors = audio(tritonclient.grpc, recordings[0][:1600])
    most = SETTINGS[name]["max_streams"]
    with tritonclient.grpc.InferenceServerClient(url) as client:
        for stream_id in range(1, most + 1):
            client.infer(name, tensors, client_timeout=GUARD_S, **sequence(stream_id, "S"))
        with pytest.raises(InferenceServerException, match=f"max_streams is {most};"):
            client.infer(name, tensors, client_timeout=GUARD_S, **sequence(most + 1, "S"))
        for stream_id in range(1, most + 1):
            client.infer(name, tensors, client_timeout=GUARD_S, **sequence(stream_id, "E"))
