"""What `oasr-serve --check-only` says of icefall's checkpoints, good and bad."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from oasr_backend.serve.app import app
from oasr_backend.serve.ports import find_free_ports
from tests.bad_icefall_cases import BAD
from tests.conftest import GOLDEN_DIR, MODEL_REPOSITORY
from tests.icefall_helpers import BOTH, EPOCH, copy_icefall, edit_arguments

#: A check starts a process that loads the model, so that all others take their time.
SERVED = ("several epochs", "truncated", "heads unknown", "not causal", "a token too few", "lora")


def check_only(checkpoint: Path) -> Result:
    names = ("http", "grpc", "metrics")
    ports = zip(names, find_free_ports(len(names)), strict=True)
    return CliRunner().invoke(
        app,
        [
            *("--model-repository", str(MODEL_REPOSITORY), "--checkpoint", str(checkpoint)),
            *(f"--{name}-port={port}" for name, port in ports),
            *("--host", "127.0.0.1", "--device", "cpu", "--check-only"),
        ],
    )


@pytest.mark.parametrize(
    "checkpoint", [GOLDEN_DIR / BOTH, GOLDEN_DIR / EPOCH / "epoch-30.pt"], ids=["folder", "file"]
)
def test_a_folder_and_the_file_in_it_pass(checkpoint: Path) -> None:
    result = check_only(checkpoint)
    assert result.exit_code == 0, result.stderr
    assert f"loaded oasr_streaming with {checkpoint};" in result.stdout


def test_a_warning_of_the_load_is_a_note_of_the_check(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    edit_arguments(directory, chunk_size="8,64", left_context_frames="64")
    result = check_only(directory)
    assert result.exit_code == 0
    assert f"loaded oasr_streaming with {directory};" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("note: oasr_streaming: event=untrained_chunks chunk_size=16, and the")
    assert "was trained with 8 or 64 frames of 20 ms; its texts may be worse" in line


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [*SERVED, *(pytest.param(case, marks=pytest.mark.slow) for case in BAD if case not in SERVED)],
)
def test_a_bad_one_is_told_in_one_line(tmp_path: Path, case: str) -> None:
    bad = BAD[case]
    directory = copy_icefall(tmp_path, bad.golden)
    bad.spoil(directory)
    result = check_only(directory)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("load: the model oasr_streaming cannot be loaded: ")
    for words in bad.told:
        assert words in line
