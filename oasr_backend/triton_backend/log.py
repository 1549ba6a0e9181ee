"""Where the log of an instance goes, and in which form."""

from __future__ import annotations

import io
import logging
import sys


def log_to_stderr(level: str) -> None:
    """The server's log, without a round trip to its process for every line.

    UTF-8 whatever the locale, so that the id of a stream is found as it was sent.
    """
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    package_logger = logging.getLogger("oasr_backend")
    package_logger.setLevel(level.upper())
    package_logger.handlers = [handler]
    package_logger.propagate = False
