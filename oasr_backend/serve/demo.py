"""`make demo`: a real tritonserver, a shipped recording at real-time pace, live captions.

python -m oasr_backend.serve.demo [FILE ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from oasr_backend.errors import ServerError
from oasr_backend.serve.process import TritonServer, local_settings

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
RECORDING = REPOSITORY / "oasr_streaming/demo_en/testset/kokoro_LJ050-0011_bf_emma.wav"
_READY_TIMEOUT_S = 180


def main() -> None:
    # A caption stays one line, whatever the width.
    console = Console(soft_wrap=True)
    files = sys.argv[1:] or [str(RECORDING)]
    console.print("[bold]Starting tritonserver[/] with model_repository/oasr_streaming ...")
    begin_s = time.monotonic()
    try:
        with TritonServer(local_settings(REPOSITORY)) as server:
            server.wait_ready(_READY_TIMEOUT_S)
            ready_s = time.monotonic() - begin_s
            console.print(f"Ready after {ready_s:.1f} s. Streaming {escape(_brief(files[0]))}")
            status = _stream(console, server.grpc_url, files)
    except ServerError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        sys.exit(1)
    console.print("Server stopped.")
    sys.exit(status)


def _brief(path: str) -> str:
    """The path from the working directory, if that is shorter."""
    return min(path, os.path.relpath(path), key=len)


def _stream(console: Console, url: str, files: list[str]) -> int:
    """Runs the client that users run, and shows each new caption with the audio it covers."""
    command = [sys.executable, "-m", "oasr_client", "--url", url, "--realtime", "--json", *files]
    shown = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as client:
        assert client.stdout is not None
        for line in client.stdout:
            update = json.loads(line)
            text, is_final = update["text"], update["is_final"]
            if text != shown or is_final:
                mark = "[bold green]final  [/]" if is_final else "[dim]partial[/]"
                console.print(f"{update['audio_s']:6.2f} s  {mark}  {escape(text)}")
            shown = text
    return client.returncode


if __name__ == "__main__":
    main()
