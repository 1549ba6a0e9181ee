"""The graph of an encoder that has none yet: made beside the service, which takes it over."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping

from oasr_backend.streaming.assemble import take_kept_graph
from oasr_backend.streaming.engine import Engine
from oasr_backend.triton_backend.startup import settle_memory

logger = logging.getLogger(__name__)

#: The service's steps come first.
_NICENESS = 10
_LONGEST_MAKING_S = 600.0


class GraphMaker:
    """Loads the model once more in a process of its own, which makes the graph and keeps it.

    There the exporter's memory goes back to the machine, and its Python does not hold up the
    service's. Where it fails PyTorch goes on serving, and the log says why.
    """

    def __init__(self, args: Mapping[str, str], engine: Engine) -> None:
        """`args` are those of Triton's `initialize`."""
        self._engine = engine
        self._is_stopped = False
        command = [_python(), "-m", "oasr_backend.triton_backend.load", json.dumps(dict(args))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
        self._thread = threading.Thread(target=self._run, name="oasr-graph-maker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns once no process and no thread of it is left."""
        self._is_stopped = True
        self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        try:
            _, said = self._process.communicate(timeout=_LONGEST_MAKING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, said = self._process.communicate()
        if self._is_stopped:
            return
        if self._process.returncode:
            cause = (said.strip().splitlines() or [f"status {self._process.returncode}"])[-1]
            logger.warning("event=graph_not_made reason=%s", cause)
            return
        try:
            is_taken = take_kept_graph(self._engine)
        except Exception as error:
            logger.error("event=graph_not_taken", exc_info=error)
            return
        settle_memory()
        logger.info("event=graph_taken is_taken=%s", is_taken)


def _python() -> str:
    """The interpreter whose packages the model's process has; that process may be Triton's stub."""
    if os.path.basename(sys.executable).startswith("python"):
        return sys.executable
    return shutil.which("python3") or "python3"
