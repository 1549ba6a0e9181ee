from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from oasr_backend.serve.stack import STACK_BYTES

ROOT = Path(__file__).parents[1]


@pytest.fixture(name="instructions", scope="module")
def _instructions() -> list[tuple[str, str]]:
    """Pairs of keyword and arguments, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(keyword, arguments.strip()) for keyword, _, arguments in pairs]


def _arguments(instructions: list[tuple[str, str]], keyword: str) -> list[str]:
    return [arguments for name, arguments in instructions if name == keyword]


def _copied(instructions: list[tuple[str, str]]) -> list[str]:
    return [source for item in _arguments(instructions, "COPY") for source in item.split()[:-1]]


def test_the_base_image_is_an_argument_with_a_pinned_default(
    instructions: list[tuple[str, str]],
) -> None:
    assert instructions[0][0] == "ARG"
    assert re.fullmatch(r"TRITON_IMAGE=\S+/tritonserver:\d\d\.\d\d-py3", instructions[0][1])
    assert _arguments(instructions, "FROM") == ["${TRITON_IMAGE}"]


def test_every_copied_path_exists_and_reaches_the_build(
    instructions: list[tuple[str, str]],
) -> None:
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for source in _copied(instructions):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in sent


def test_the_copied_folders_hold_every_package_that_is_installed(
    instructions: list[tuple[str, str]],
) -> None:
    assert {"oasr_backend/", "client/", "pyproject.toml", "README.md"} <= set(_copied(instructions))


def test_the_package_is_installed_the_way_the_makefile_does(
    instructions: list[tuple[str, str]],
) -> None:
    (install,) = _arguments(instructions, "RUN")
    assert "-m pip install" in install
    assert "-e ." in install
    assert "-e ." in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_console_needs_of_the_server_extra_are_installed(
    instructions: list[tuple[str, str]],
) -> None:
    (install,) = _arguments(instructions, "RUN")
    extra = re.search(r"^server = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None
    # The image has a server, and its model runs on a GPU.
    others = {"nvidia-pytriton", "onnx", "onnxruntime"}
    needs = {item for item in json.loads(extra[1]) if Requirement(item).name not in others}
    assert all(f"'{need}'" in install for need in needs)


def test_the_image_starts_the_console_script(instructions: list[tuple[str, str]]) -> None:
    (command,) = _arguments(instructions, "CMD")
    assert json.loads(command) == ["oasr-serve"]
    assert 'oasr-serve = "oasr_backend.serve.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_the_image_says_how_to_allow_the_stack_that_the_server_wants() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"--ulimit stack={STACK_BYTES}" in text


def test_the_open_ports_are_those_of_the_server(instructions: list[tuple[str, str]]) -> None:
    assert _arguments(instructions, "EXPOSE") == ["8000 8001 8002"]
