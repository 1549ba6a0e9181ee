"""Command lines that `oasr-client` refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_helpers import oasr_client
from oasr_client.cli import app
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give audio files"),
        (["a.wav", "--microphone"], "give audio files"),
        (["a.wav", "--option", "nbest"], "key=value"),
        (["a.wav", "b.wav", "--format", "srt"], "--output-dir"),
        (["a.wav", "--json", "--format", "vtt"], "--json"),
        (["x/a.wav", "y/a.wav", "--output-dir", "out"], "one name"),
        (["a.wav", "--url", "http://host:8000"], "scheme"),
        (["a.wav", "--protocol", "ws"], "ws"),
        (["--manifest", "absent.json"], "absent.json"),
        (["a.wav", "--output-dir", "file"], "file cannot be made (File exists)"),
        (["a.wav", "--output-dir", "file/out"], "file/out cannot be made (Not a directory)"),
        (["a.wav", "--chunk-ms", "inf"], "chunk_ms is inf"),
        (["a.wav", "--chunk-ms", "nan"], "--chunk-ms"),
        (["a.wav", "--timeout", "inf"], "timeout_s is inf"),
        (["a.wav", "--timeout", "nan"], "--timeout"),
        (["a.raw", "--raw", "pcm16", "--raw-rate", "3"], "3 Hz, expected 4000 to 384000"),
        (["a.raw", "--raw", "pcm16", "--raw-rate", "384001"], "384001 Hz, expected 4000"),
        (["a.wav", "--raw-rate", "8000"], "--raw-rate has no effect without --raw"),
        (["--microphone", "--raw", "pcm16"], "--raw has no effect with --microphone"),
        (["--microphone", "--raw-rate", "8000"], "--raw-rate has no effect"),
        (["--microphone", "--parallel", "1"], "--parallel has no effect with --microphone"),
        (["--microphone", "--realtime"], "--realtime has no effect with --microphone"),
        (["a.wav", "--json", "--output-dir", "out"], "--output-dir has no effect with --json"),
        (["a.wav", "--json", "--format", "srt"], "--format has no effect with --json"),
        (["a.wav", "--json", "--format", "txt"], "--format has no effect with --json"),
        (["a.wav", "--option", "nbest=3"], "--option nbest has no effect with --format txt"),
        (["a.wav", "--json", "--option", "word_times=true"], "add --format json or srt or vtt"),
        (["a.wav", "--format", "vtt", "--option", "nbest=2"], "nbest has no effect with --form"),
        (["a.wav", "--option", "endpoint=true"], "--option endpoint has no effect with --form"),
        (["a.wav", "--option", "sample_rate=8000"], "what is sent has sample_rate=16000"),
        (["a.wav", "--option", "encoding=mulaw"], "what is sent has encoding=pcm"),
        (["a.wav", "--option", "a=1", "--option", "a=2"], "option a is given twice"),
        (["a.wav", "--url", ""], "url is empty"),
        (["a.wav", "--chunk-ms", "-5"], "--chunk-ms"),
        (["a.wav", "--parallel", "0"], "--parallel"),
    ],
)
def test_a_wrong_command_line_is_status_2(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    # In this process: a new one takes a second each.
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})
    assert done.exit_code == 2, done.exception
    assert words in done.stderr


def test_a_wrong_command_line_is_told_without_a_traceback() -> None:
    done = oasr_client("a.wav", "--raw-rate", "8000", env={**os.environ, "COLUMNS": "500"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "--raw-rate has no effect without --raw; leave it out" in done.stderr
