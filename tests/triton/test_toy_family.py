"""The family of docs/add_an_encoder.md, installed beside the package, on a real tritonserver."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from oasr_backend.config import ServingConfig
from oasr_backend.serve.ports import find_free_ports
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.types import Samples
from tests.conftest import ROOT
from tests.engine_helpers import ask_one
from tests.guards import GUARD_S
from tests.toy_family import install, installed, tune, write_checkpoint
from tests.triton.wire import audio, sequence, text_of

MODEL = "oasr_streaming"
RATES = (8_000, 16_000)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with our packages and the family's, and a checkpoint of the family."""

    python: Path
    toy_dir: Path

    def command(self, *options: str) -> list[str]:
        ports = zip(
            ("--http-port", "--grpc-port", "--metrics-port"), find_free_ports(3), strict=True
        )
        flags = [f"{flag}={port}" for flag, port in ports]
        command = [str(self.python), "-m", "oasr_backend.serve.cli", "--host", "127.0.0.1", *flags]
        return [*command, "--checkpoint", str(self.toy_dir), "--device", "cpu", *options]


@pytest.fixture(name="environment", scope="module")
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """Serving from it changes no file of the package."""
    before = digest_of_package()
    folder = tmp_path_factory.mktemp("outside")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    install(site)
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "ours.pth").write_text(ours, encoding="utf-8")
    toy_dir = write_checkpoint(folder / "toy")
    # A file of a name that WeNet's checkpoints have too makes it none of theirs.
    (toy_dir / "units.txt").write_text("of the family's own", encoding="utf-8")
    yield Environment(venv / "bin" / "python", toy_dir)
    assert digest_of_package() == before


def digest_of_package() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "oasr_backend").rglob("*.py")):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


@pytest.fixture(name="url", scope="module")
def _url(environment: Environment) -> Iterator[str]:
    command = environment.command()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready: ")
            yield line.strip().rpartition("grpc ")[2]
        finally:
            process.terminate()
            process.wait(GUARD_S)


@pytest.fixture(name="expected", scope="module")
def _expected(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The text of each rate's recording in this process."""
    with installed(tmp_path_factory.mktemp("site")):
        engine = load_engine(environment.toy_dir, ServingConfig.of(max_streams=2), device="cpu")
        results = {
            rate: ask_one(
                engine, rate, recording(rate), flags="SE", parameters={"sample_rate": rate}
            )
            for rate in RATES
        }
    assert all(result.error is None for result in results.values())
    return {rate: result.text for rate, result in results.items()}


def recording(rate: int) -> Samples:
    return tune(20, seconds=3.3, rate=rate)


def test_a_check_of_the_checkpoint_passes(environment: Environment) -> None:
    done = subprocess.run(
        environment.command("--check-only"),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all checks passed" in done.stdout


def test_a_check_names_the_chunk_size_that_was_not_trained(environment: Environment) -> None:
    done = subprocess.run(
        environment.command("--check-only", "--set", "chunk_size=12"),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode != 0
    assert "chunk_size=12" in done.stderr
    assert "set chunk_size to 8 or 16" in done.stderr


@pytest.mark.parametrize("rate", RATES)
def test_streams_give_the_texts_of_the_engine(
    url: str, rate: int, expected: dict[int, str]
) -> None:
    samples_S = recording(rate)
    pieces = np.array_split(samples_S, 7)
    with tritonclient.grpc.InferenceServerClient(url) as client:
        for number, piece in enumerate(pieces):
            flags = ("S" if number == 0 else "") + ("E" if piece is pieces[-1] else "")
            found = client.infer(
                MODEL,
                audio(tritonclient.grpc, piece),
                parameters={"sample_rate": rate} if number == 0 else None,
                client_timeout=GUARD_S,
                **sequence(rate, flags),
            )
    assert len(expected[rate]) > 5
    assert text_of(found) == expected[rate]
