"""What `oasr-client` writes: encodings, names of files, excerpts, warnings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from cli_helpers import COMMAND, at, oasr_client
from echo_helpers import live_streams

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
    # Decoded strictly: the halves of characters would be no Unicode.
    assert [name.encode() for name in files] == [names[0], rb"\xff\xfe.wav", *names[2:]]
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
        f"{recording} from 0 s to 0.5 s: heard 8000",
        f"{recording} from 0.5 s to 1.25 s: heard 12000",
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


@pytest.mark.parametrize(
    ("arguments", "num_files"),
    [([], 1), ([], 3), (["--json"], 1), (["--json"], 3), (["--format", "vtt"], 1)],
)
def test_a_full_disk_is_one_line_and_ends_every_stream(
    echo_server: TritonServer, recording: Path, arguments: list[str], num_files: int
) -> None:
    copies = [shutil.copy(recording, recording.with_name(f"{i}.wav")) for i in range(num_files)]
    command = [*COMMAND, *at(echo_server), "--parallel", "2", *arguments, *map(str, copies)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=-1, text=True, timeout=GUARD_S)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "oasr-client: stdout cannot be written (No space left on device); free space there, or "
        "keep its reader"
    ]
    assert live_streams(echo_server) == 0


def test_a_reader_that_leaves_is_one_line(echo_server: TritonServer, recording: Path) -> None:
    command = [*COMMAND, *at(echo_server), "--json", "--realtime", "--chunk-ms", "100"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, str(recording)], **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate(timeout=GUARD_S)
    assert process.returncode == 1
    assert errors.startswith("oasr-client: stdout cannot be written (Broken pipe)")
    assert len(errors.splitlines()) == 1
    assert live_streams(echo_server) == 0


def test_closed_streams_of_the_shell_are_no_traceback(
    echo_server: TritonServer, recording: Path
) -> None:
    command = " ".join([*COMMAND, *at(echo_server), str(recording)])
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": GUARD_S}
    done = subprocess.run(["sh", "-c", f"{command} >&-"], check=False, **pipes)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("oasr-client: stdout is closed; redirect it")
    assert len(done.stderr.splitlines()) == 1
    deaf = subprocess.run(["sh", "-c", f"{command} absent.wav 2>&-"], check=False, **pipes)
    assert (deaf.returncode, deaf.stdout) == (1, f"{recording}: heard 24000\n")


def test_a_failure_of_a_file_of_any_name_is_one_line(tmp_path: Path) -> None:
    done = oasr_client("odd\nname\u2028.wav", cwd=tmp_path)
    assert done.stderr == r"oasr-client: odd\nname\u2028.wav: no such file; check the path" + "\n"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_nothing_is_scored_where_every_file_failed(tmp_path: Path, arguments: list[str]) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps([{"audio": "absent.wav", "text": "a"}]))
    done = oasr_client("--manifest", manifest, *arguments)
    assert done.returncode == 1
    assert "WER" not in done.stdout
    assert "wer" not in done.stdout


def test_a_server_lost_in_mid_stream_leaves_what_was_heard(
    doomed_server: TritonServer, tmp_path: Path
) -> None:
    path = tmp_path / "long.wav"
    soundfile.write(path, np.zeros(20 * 16000), 16000)
    command = [*COMMAND, *at(doomed_server), "--json", "--realtime", "--chunk-ms", "500", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        os.killpg(doomed_server.pid, signal.SIGKILL)
        rest, errors = process.communicate(timeout=GUARD_S)
    lines = [json.loads(line) for line in rest.splitlines()]
    assert process.returncode == 1
    assert lines[-1]["kind"] == "ServerUnavailableError"
    num_heard = int(lines[-1]["partial_text"].removeprefix("heard "))
    assert num_heard >= 16000
    assert "text" not in lines[-1]
    assert not any(line.get("is_final") for line in lines)
    assert errors.startswith(f"oasr-client: {path}: of 20.00 s in all, ")
    assert f"from {num_heard / 16000:.2f} s on, were not heard: no server answers" in errors


def test_plain_text_tells_what_was_heard_of_a_file_beside_its_failure(
    echo_server: TritonServer, recording: Path
) -> None:
    slow = ["--option", "sleep_from=2", "--option", "sleep_ms=4000", "--timeout", 2]
    done = oasr_client(*at(echo_server), recording, *slow)
    assert (done.returncode, done.stdout) == (1, "")
    failed, heard = done.stderr.splitlines()
    assert failed.startswith(
        f"oasr-client: {recording}: of 1.50 s in all, 0.64 s of the audio sent"
    )
    assert "from 0.64 s on, were not heard: " in failed
    assert heard == f"oasr-client: {recording}: heard until then: heard 10240"
