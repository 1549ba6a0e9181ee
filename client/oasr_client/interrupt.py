"""Ctrl-C where no event loop waits for it: during the imports and after the work."""

from __future__ import annotations

import os
import signal
from types import FrameType

#: Shells give this exit status after SIGINT.
INTERRUPTED = 130


def quit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process with one line, unless the process ignores it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _quit)


def _quit(_number: int, _frame: FrameType | None) -> None:
    # An exception would not do, since half-imported libraries turn it into others.
    os.write(2, b"oasr-client: cancelled\n")
    os._exit(INTERRUPTED)
