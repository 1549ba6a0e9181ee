"""Command lines that `oasr-client` refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_helpers import oasr_client
from oasr_client.cli import app
from typer.testing import CliRunner

MANIFESTS = {
    "empty.json": "[]",
    "blank.json": " \n\n",
    "deep.json": 100_000 * "[",
    "line2.json": '{"audio": "a.wav", "text": ""}\n\n{audio}\n',
    "huge.json": json.dumps([{"audio": "a.wav", "text": "", "offset": 10**400}]),
}


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
        (
            ["a.wav", "--option", "decoder=greedy", "--option", "beam_size=3"],
            "--option beam_size has no effect with decoder=greedy; leave it out",
        ),
        (
            ["a.wav", "--option", "hotwords=", "--option", "hotword_boost=5"],
            "--option hotword_boost has no effect with hotwords=; leave it out",
        ),
        (
            [
                *["a.wav", "--format", "srt", "--option", "endpoint=false"],
                *["--option", "endpoint_max_s=5"],
            ],
            "--option endpoint_max_s has no effect with endpoint=false; leave it out",
        ),
        (["--manifest", "empty.json"], "manifest empty.json holds no entries"),
        (["--manifest", "blank.json"], "manifest blank.json holds no entries"),
        (["--manifest", "deep.json"], "deep.json: not a manifest"),
        (["--manifest", "line2.json"], "line2.json: not a manifest (line 3, column 2: Expecting"),
        (["--manifest", "huge.json"], "entry 1: its offset is 1000"),
        (["a.wav", "--url", ""], "url is empty"),
        (["a.wav", "--chunk-ms", "-5"], "--chunk-ms"),
        (["a.wav", "--parallel", "0"], "--parallel"),
    ],
)
def test_a_wrong_command_line_is_status_2(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name, content in MANIFESTS.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    # The command runs in this process, since a new one takes a second.
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})
    assert done.exit_code == 2, done.exception
    assert words in done.stderr


def test_a_wrong_command_line_is_told_without_a_traceback() -> None:
    done = oasr_client("a.wav", "--raw-rate", "8000", env={**os.environ, "COLUMNS": "500"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "--raw-rate has no effect without --raw; leave it out" in done.stderr


@pytest.mark.parametrize(
    "option", ["beam_size=3", "hotword_boost=5", "hotwords=x|y", "decoder=prefix_beam"]
)
def test_what_the_servers_defaults_may_give_an_effect_is_sent(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["absent.wav", "--parallel", "8", "--option", option])
    assert done.exit_code == 1, done.exception
    assert "absent.wav: no such file" in done.stderr
