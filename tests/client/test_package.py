"""The client as a package of its own, built and installed without the server's half."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.guards import GUARD_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CLIENT = ROOT / "client"


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module", name="installed")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and nothing else."""
    source = tmp_path_factory.mktemp("source") / "client"
    shutil.copytree(CLIENT, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__py*"))
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--target", target, source]
    subprocess.run(command, check=True, timeout=GUARD_S)
    return target


def test_no_requirement_brings_torch_or_the_server(installed: Path) -> None:
    (metadata,) = installed.glob("oasr_client-*.dist-info/METADATA")
    required = email.message_from_string(metadata.read_text("utf-8")).get_all("Requires-Dist")
    assert required is not None
    names = {True: set[str](), False: set[str]()}
    for requirement in map(Requirement, required):
        names["extra" in str(requirement.marker)].add(requirement.name)
    assert names[False] == {"numpy", "tritonclient", "soundfile", "soxr", "typer", "rich"}
    assert names[True] == {"sounddevice", "jiwer", "regex"}


WITHOUT_TORCH = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "oasr_backend", "pytriton"):
            raise ImportError(name + " is imported")
sys.meta_path.insert(0, Refused())
sys.path.insert(0, sys.argv[1])
import oasr_client, oasr_client.cli, oasr_client.grpc_transport, oasr_client.http_transport
assert oasr_client.__file__.startswith(sys.argv[1]), oasr_client.__file__
for name in oasr_client.__all__:
    getattr(oasr_client, name)
oasr_client.cli.app(["--help"])
"""


def test_everything_of_it_is_imported_without_torch(installed: Path) -> None:
    # Isolated: neither the folder of the tests nor PYTHONPATH comes before the installed package.
    command = [sys.executable, "-I", "-c", WITHOUT_TORCH, str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--manifest" in done.stdout
    assert (installed / "oasr_client" / "py.typed").exists()


def test_its_command_runs(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, installed / "bin" / "oasr-client", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=GUARD_S, check=True, env=environment
    )
    assert "--microphone" in done.stdout


def test_the_whole_project_asks_for_the_same_of_it() -> None:
    whole, alone = project(ROOT), project(CLIENT)
    assert whole["version"] == alone["version"]
    assert whole["requires-python"] == alone["requires-python"]
    assert whole["scripts"]["oasr-client"] == alone["scripts"]["oasr-client"]
    extra = {
        line.replace("[all]", "[grpc,http]") for line in whole["optional-dependencies"]["client"]
    }
    assert extra | {"numpy>=1.24"} == set(alone["dependencies"])
    assert set(alone["optional-dependencies"]["wer"]) <= set(whole["optional-dependencies"]["test"])
