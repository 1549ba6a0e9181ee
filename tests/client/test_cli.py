"""`oasr-client` as a process against a real server."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from cli_helpers import COMMAND, at, oasr_client

from oasr_backend.serve.process import TritonServer
from tests.guards import GUARD_S


def test_one_file_is_one_line_of_text(echo_server: TritonServer, recording: Path) -> None:
    done = oasr_client(*at(echo_server), recording)
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard 24000\n", "")


def test_several_files_have_their_names_and_fail_alone(
    echo_server: TritonServer, recording: Path, tmp_path: Path
) -> None:
    absent = tmp_path / "absent.wav"
    done = oasr_client(*at(echo_server), "--parallel", 2, absent, recording)
    assert done.returncode == 1
    assert done.stdout == f"{recording}: heard 24000\n"
    assert done.stderr == f"oasr-client: {absent}: no such file; check the path\n"


def test_json_lines_tell_every_answer(echo_server: TritonServer, recording: Path) -> None:
    arguments = [*at(echo_server), "--json", "--chunk-ms", 640, "--option", "label=a=b", recording]
    lines = [json.loads(line) for line in oasr_client(*arguments).stdout.splitlines()]
    assert [line["text"] for line in lines] == [
        "a=b heard 10240",
        "a=b heard 20480",
        "a=b heard 24000",
    ]
    assert [line["is_final"] for line in lines] == [False, False, True]
    assert [line["audio_s"] for line in lines] == [0.64, 1.28, 1.5]
    assert all(line["file"] == str(recording) and line["latency_ms"] > 0 for line in lines)
    finals = oasr_client(*arguments, "--no-partials").stdout.splitlines()
    assert [json.loads(line)["is_final"] for line in finals] == [True]


def test_http_and_fp32_say_the_same(echo_server: TritonServer, recording: Path) -> None:
    url = ["--url", echo_server.http_url, "--protocol", "http", "--dtype", "fp32"]
    done = oasr_client(*url, "--model", "echo", recording)
    assert (done.returncode, done.stdout) == (0, "heard 24000\n")


def test_realtime_takes_as_long_as_the_recording(echo_server: TritonServer, tmp_path: Path) -> None:
    path, num_chunks = tmp_path / "long.wav", 12
    soundfile.write(path, np.zeros(num_chunks * 8000), 16000)
    command = [*COMMAND, *at(echo_server), "--realtime", "--json", "--chunk-ms", "500", str(path)]
    begin_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        num_answers = sum(1 for _ in process.stdout)
    assert num_answers == num_chunks
    assert time.monotonic() - begin_s >= 0.5 * num_chunks, "unpaced it is over at once"


def test_captions_and_documents_are_written_per_file(
    echo_server: TritonServer, recording: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.wav"
    soundfile.write(other, np.zeros(800), 8000)
    done = oasr_client(
        *at(echo_server), recording, other, "--format", "srt", "--output-dir", tmp_path / "out"
    )
    assert (done.returncode, done.stdout) == (0, "")
    caption = (tmp_path / "out" / "tone.srt").read_text()
    assert caption.split("\n\n") == [
        "1\n00:00:00,000 --> 00:00:00,250\nheard",
        "2\n00:00:01,250 --> 00:00:01,500\n24000",
        "",
    ]
    assert "1600" in (tmp_path / "out" / "other.srt").read_text()
    document = json.loads(oasr_client(*at(echo_server), recording, "--format", "json").stdout)
    assert (document["text"], document["audio_s"]) == ("heard 24000", 1.5)
    lines = oasr_client(*at(echo_server), recording, "--json", "--format", "json").stdout
    line = json.loads(lines.splitlines()[-1])
    assert line["latency_ms"] > 0
    assert document == {"file": str(recording), "audio_s": 1.5, **line["result"]}
    assert oasr_client(*at(echo_server), recording, "--format", "vtt").stdout.startswith("WEBVTT")


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_captions_ask_for_word_times_unless_the_user_decides(
    echo_server: TritonServer, recording: Path, form: str
) -> None:
    command = [*at(echo_server), recording, "--format", form]
    assert oasr_client(*command).stdout.count("-->") == 2
    without = oasr_client(*command, "--option", "word_times=false").stdout
    assert without.count("-->") == 1
    assert "heard 24000" in without


def test_a_file_of_no_samples_is_warned_of(echo_server: TritonServer, tmp_path: Path) -> None:
    empty = tmp_path / "empty.wav"
    soundfile.write(empty, np.zeros(0), 16000)
    done = oasr_client(*at(echo_server), empty)
    assert (done.returncode, done.stdout) == (0, "heard 0\n")
    assert done.stderr.startswith(f"oasr-client: {empty}: holds no samples")


def test_a_file_that_is_not_heard_whole_is_told_with_status_1(
    echo_server: TritonServer, recording: Path
) -> None:
    done = oasr_client(*at(echo_server), recording, "--option", "longest=0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"oasr-client: {recording}: of 1.50 s in all, the server ended")
    assert "0.64 s of the audio sent, from 0.00 s on, were not heard" in done.stderr


def test_a_manifest_is_scored(echo_server: TritonServer, recording: Path) -> None:
    manifest = recording.parent / "manifest.jsonl"
    manifest.write_text(json.dumps({"audio": recording.name, "text": "HEARD 24000 TIMES"}) + "\n")
    done = oasr_client(*at(echo_server), "--manifest", manifest)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "WER 33.33% (1 errors in 3 words, 1 files)"
    lines = oasr_client(*at(echo_server), "--manifest", manifest, "--json").stdout.splitlines()
    assert json.loads(lines[-1]) == {"wer": 0.333333, "errors": 1, "words": 3, "files": 1}


def test_a_file_listed_twice_is_heard_once_and_scored_against_each_text(
    echo_server: TritonServer, recording: Path
) -> None:
    entries = [{"audio": recording.name, "text": text} for text in ("HEARD 24000", "heard, some")]
    manifest = recording.parent / "manifest.json"
    manifest.write_text(json.dumps(entries))
    done = oasr_client(*at(echo_server), "--manifest", manifest)
    # The rate counts punctuation as a part of its word.
    assert done.stdout == "heard 24000\nWER 50.00% (2 errors in 4 words, 2 files)\n"


def test_a_document_that_cannot_be_written_is_told_with_its_file(
    echo_server: TritonServer, recording: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "out" / "tone.txt"
    taken.mkdir(parents=True)
    done = oasr_client(*at(echo_server), recording, "--output-dir", taken.parent)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"oasr-client: {recording}: {taken}: not writable")
    assert len(done.stderr.splitlines()) == 1


def test_a_terminal_shows_partials_and_keeps_the_final(
    echo_server: TritonServer, recording: Path
) -> None:
    leader, follower = pty.openpty()
    command = [*COMMAND, *at(echo_server), str(recording), "--realtime", "--chunk-ms", "300"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = read_terminal(leader)
    assert process.wait(GUARD_S) == 0
    assert "heard 4800" in shown
    assert "heard 24000" in shown


def read_terminal(leader: int) -> str:
    parts = []
    try:
        while part := os.read(leader, 65536):
            parts.append(part)
    except OSError:
        # Linux reports the far end's closing as an input/output error.
        pass
    os.close(leader)
    return b"".join(parts).decode()


FAKE_MICROPHONE = """
import threading
import numpy as np

class PortAudioError(Exception):
    pass

class InputStream:
    def __init__(self, *, blocksize, callback, **settings):
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.play, args=(np.zeros((blocksize, 1)), callback))
    def play(self, block, callback):
        while not self.done.wait(0.05):
            callback(block, len(block), None, None)
    def __enter__(self):
        self.thread.start()
    def __exit__(self, *error):
        self.done.set()
        self.thread.join()
"""


def test_the_microphone_is_heard_until_ctrl_c_and_finished(
    echo_server: TritonServer, tmp_path: Path
) -> None:
    (tmp_path / "sounddevice.py").write_text(FAKE_MICROPHONE)
    command = [*COMMAND, *at(echo_server), "--microphone", "--json", "--chunk-ms", "100"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=GUARD_S)
    assert process.returncode == 0
    answers = [json.loads(line) for line in [*lines, *rest.splitlines()]]
    assert [answer["audio_s"] for answer in answers[:3]] == [0.1, 0.2, 0.3]
    assert [answer["is_final"] for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[-1]["text"] == f"heard {round(answers[-1]['audio_s'] * 16000)}"


def test_an_absent_server_is_told_with_the_file(recording: Path) -> None:
    done = oasr_client("--url", "127.0.0.1:9", recording)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"oasr-client: {recording}: no server answers at 127.0.0.1:9")
