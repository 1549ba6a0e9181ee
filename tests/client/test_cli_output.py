"""What `oasr-client` writes: encodings, names of files, excerpts, warnings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from cli_helpers import COMMAND, at, oasr_client

from oasr_backend.serve.process import TritonServer
from tests.guards import GUARD_S


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize("arguments", [["--json"], ["--format", "json"], ["--format", "vtt"]])
def test_documents_are_utf_8_whatever_the_locale(
    echo_server: TritonServer, recording: Path, arguments: list[str], encoding: str
) -> None:
    option = ["--option", "label=今天 é <"]
    command = [*COMMAND, *at(echo_server), str(recording), *arguments, *option]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        command, capture_output=True, timeout=GUARD_S, check=True, env=environment
    )
    assert "今天 é" in done.stdout.decode("utf-8")


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "今天 é".encode()),
        ("cp1252", b"\\u4eca\\u5929 \xe9"),
        ("ascii", b"\\u4eca\\u5929 \\xe9"),
    ],
)
def test_plain_text_keeps_the_locale_and_escapes_what_it_lacks(
    echo_server: TritonServer, recording: Path, encoding: str, shown: bytes
) -> None:
    command = [*COMMAND, *at(echo_server), str(recording), "--option", "label=今天 é"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        command, capture_output=True, timeout=GUARD_S, check=True, env=environment
    )
    assert (done.stdout, done.stderr) == (shown + b" heard 24000\n", b"")


def test_files_of_any_name_are_read(
    echo_server: TritonServer, recording: Path, tmp_path: Path
) -> None:
    names = [b"-x.wav", b"\xff\xfe.wav", "今.wav".encode(), b"a: b.wav", b"new\nline.wav"]
    for name in names:
        shutil.copy(recording, os.fsencode(tmp_path) + b"/" + name)
    command = [*COMMAND, *at(echo_server), "--parallel", "1"]
    pipes: dict[str, Any] = {"capture_output": True, "timeout": 60, "cwd": tmp_path}
    plain = subprocess.run([*command, "--", *names], check=True, **pipes)
    assert plain.stderr == b""
    shown = [name.replace(b"\n", b"\\n") for name in names]
    assert plain.stdout == b"".join(name + b": heard 24000\n" for name in shown)
    lines = subprocess.run([*command, "--json", "--no-partials", "--", *names], check=True, **pipes)
    files = [json.loads(line)["file"] for line in lines.stdout.decode("utf-8").splitlines()]
    assert [os.fsencode(name) for name in files] == names
    subprocess.run([*command, "--output-dir", "out", "--", *names], check=True, **pipes)
    written = set(os.listdir(os.fsencode(tmp_path / "out")))
    assert written == {name.replace(b".wav", b".txt") for name in names}
    absent = subprocess.run([*command, b"\xff.wav"], check=False, **pipes)
    assert (absent.returncode, absent.stdout) == (1, b"")
    assert absent.stderr == b"oasr-client: \\udcff.wav: no such file; check the path\n"


def test_excerpts_of_a_manifest_are_cut_scored_and_named(
    echo_server: TritonServer, recording: Path, tmp_path: Path
) -> None:
    manifest = tmp_path / "segments.jsonl"
    times = [{"offset": 0.0, "duration": 0.5}, {"offset": 0.5, "duration": 0.75}, {"offset": 1.25}]
    texts = ["heard 8000", "heard 12000", "heard 4000"]
    entries = [
        {"audio_filepath": recording.name, "text": text, **time}
        for time, text in zip(times, texts, strict=True)
    ]
    manifest.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    command = [*at(echo_server), "--manifest", manifest]
    done = oasr_client(*command)
    assert done.stdout.splitlines() == [
        f"{recording}: heard 8000",
        f"{recording} from 0.5 s: heard 12000",
        f"{recording} from 1.25 s: heard 4000",
        "WER 0.00% (0 errors in 6 words, 3 files)",
    ]
    lines = [json.loads(line) for line in oasr_client(*command, "--json").stdout.splitlines()]
    finals = [line for line in lines if line.get("is_final")]
    assert [(line["file"], line["offset"], line["duration"]) for line in finals] == [
        (str(recording), 0.0, 0.5),
        (str(recording), 0.5, 0.75),
        (str(recording), 1.25, None),
    ]
    assert oasr_client(*command, "--output-dir", tmp_path / "out").returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "tone.txt",
        "tone_0.5.txt",
        "tone_1.25.txt",
    }


def test_channels_that_cancel_are_warned_of(echo_server: TritonServer, tmp_path: Path) -> None:
    path = tmp_path / "stereo.wav"
    voice = np.random.default_rng(0).uniform(-0.5, 0.5, 16000)
    soundfile.write(path, np.stack([voice, -voice], axis=1), 16000)
    done = oasr_client(*at(echo_server), path, "--format", "json")
    assert json.loads(done.stdout)["mean"] == pytest.approx(0.25, abs=0.01)
    assert done.stderr.startswith(f"oasr-client: {path}: its channels cancel each other")
    assert done.returncode == 0
