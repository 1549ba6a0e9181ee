"""Where the output of one tritonserver goes: to a file, or on to the caller's stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

from oasr_backend.serve.log import OutputRelay, error_lines, load_failures

TAIL_LINES = 30
_CAUSE_SEARCH_LINES = 1_000
_RELAY_WAIT_S = 2.0


class ServerOutput:
    """`path` None: a temporary file, unless the output is relayed; then nothing is stored."""

    def __init__(self, path: Path | None, *, is_relayed: bool) -> None:
        self.path = path
        self._is_relayed = is_relayed
        self._owns_file = False
        self._relay: OutputRelay | None = None

    def open(self, pipe: int) -> contextlib.AbstractContextManager[IO[bytes] | int]:
        """What the process is to write to; `pipe` where its output is relayed."""
        if self._is_relayed:
            return contextlib.nullcontext(pipe)
        if self.path is None:
            handle, name = tempfile.mkstemp(prefix="oasr-tritonserver-", suffix=".log")
            self.path, self._owns_file = Path(name), True
            return os.fdopen(handle, "wb")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.open("wb")

    def attach(self, source: IO[bytes] | None) -> None:
        """Begins to pass on what the process writes, if it writes to a pipe."""
        if source is not None:
            self._relay = OutputRelay(source, sys.stderr.buffer)

    def join(self) -> None:
        """Waits a while until all that the process wrote has been passed on."""
        if self._relay is not None:
            self._relay.join(_RELAY_WAIT_S)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines."""
        text = ""
        if self._relay is not None:
            text = self._relay.text()
        elif self.path is not None and self.path.exists():
            text = self.path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def cause(self) -> str:
        """Why the server failed, as far as its output tells."""
        log = self.tail(_CAUSE_SEARCH_LINES)
        return "\n".join(load_failures(log)) or error_lines(log) or self.tail()

    def remove_own(self) -> None:
        """Deletes the temporary file."""
        if self._owns_file and self.path is not None:
            self.path.unlink(missing_ok=True)
