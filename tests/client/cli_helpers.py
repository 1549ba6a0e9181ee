"""`oasr-client` as a process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from oasr_backend.serve.process import TritonServer
from tests.guards import GUARD_S

COMMAND = [sys.executable, "-m", "oasr_client"]


def oasr_client(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=GUARD_S, check=False, **more
    )


def at(server: TritonServer) -> list[str]:
    return ["--url", server.grpc_url, "--model", "echo"]
