"""What a tritonserver prints: passed on, remembered, and read for the cause of a failure."""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import IO

_LOG_LEVEL = re.compile(r"[IWEF]\d{4} |error:|Error:")
_NOT_LOADED = re.compile(r"\"failed to load '(?P<model>[^']+)' version \d+: (?P<text>.*)\"\s*$")
# The Python backend puts the stack below the message, and a status name before it.
_STACK = re.compile(r"(?:\\n)+At:\\n.*")
_STATUS = re.compile(r"^(?:[A-Z]\w+( \w+)?: )?(?=\w+Error: )")
_MOST_ERROR_LINES = 30
_MOST_KEPT_LINES = 1_000


class OutputRelay:
    """Writes a process's output on, line by line, and keeps the last lines of it."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._lines: deque[bytes] = deque(maxlen=_MOST_KEPT_LINES)
        self._thread = threading.Thread(target=self._run, name="oasr-server-log", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits until the process has closed its output."""
        self._thread.join(timeout_s)

    def text(self) -> str:
        return b"".join(tuple(self._lines)).decode("utf-8", errors="replace")

    def _run(self) -> None:
        with self._source:
            for line in self._source:
                self._lines.append(line)
                self._pass_on(line)

    def _pass_on(self, line: bytes) -> None:
        try:
            self._sink.write(line)
            self._sink.flush()
        except OSError:
            # The reader of the output has gone; the server must not block on a full pipe.
            return


def load_failures(log: str) -> list[str]:
    """One line for each model that was not loaded: its name and what it raised."""
    found = (_NOT_LOADED.search(line) for line in log.splitlines())
    return [
        f"the model {match['model']} was not loaded: {_message(match['text'])}"
        for match in found
        if match is not None
    ]


def _message(text: str) -> str:
    text = _STATUS.sub("", _STACK.sub("", text))
    return " ".join(re.sub(r"\\[nt]", " ", text).replace('\\"', '"').split())


def error_lines(log: str) -> str:
    """The errors of a Triton log with the lines that belong to them, such as tracebacks."""
    kept, in_error = [], False
    for line in log.splitlines():
        if _LOG_LEVEL.match(line):
            in_error = line.startswith(("E", "error:"))
        elif line.startswith(("+--", "| ")):
            in_error = False
        if in_error and line.strip():
            kept.append(line)
    return "\n".join(kept[-_MOST_ERROR_LINES:])
