from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.get_perf_analyzer import get_perf_analyzer, run_error
from oasr_backend.errors import ServerError


@pytest.fixture(name="without_perf_analyzer")
def _without_perf_analyzer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


@pytest.mark.usefixtures("without_perf_analyzer")
def test_the_perf_analyzer_that_is_put_together_runs() -> None:
    program = get_perf_analyzer()
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert "Perf Analyzer Version" in result.stdout + result.stderr


@pytest.mark.usefixtures("without_perf_analyzer")
def test_a_perf_analyzer_that_was_built_is_used_again(tmp_path: Path) -> None:
    wrapper = tmp_path / "perf_analyzer"
    wrapper.write_text("#!/bin/sh\nexit 0\n")
    wrapper.chmod(0o755)
    assert get_perf_analyzer(tmp_path) == wrapper


def test_one_on_path_wins_if_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "perf_analyzer"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert get_perf_analyzer(tmp_path / "cache") == program


def test_a_program_that_fails_or_is_absent_has_a_reason(tmp_path: Path) -> None:
    program = tmp_path / "perf_analyzer"
    program.write_text("#!/bin/sh\necho 'libb64.so.0d: not found' >&2\nexit 127\n")
    program.chmod(0o755)
    assert run_error(program) == "libb64.so.0d: not found"
    assert run_error(tmp_path / "absent") is not None


@pytest.mark.usefixtures("without_perf_analyzer")
def test_another_processor_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ServerError, match="riscv64; put one that runs on PATH"):
        get_perf_analyzer(tmp_path / "cache")


def test_the_command_prints_the_path() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.get_perf_analyzer"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert Path(result.stdout.strip()).name == "perf_analyzer"
