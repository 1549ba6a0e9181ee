"""The life of one model instance inside Triton: load, execute, reap, unload."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from oasr_backend.config import ServingConfig, merged_parameters
from oasr_backend.engine import Engine
from oasr_backend.triton_io import TritonLogHandler, is_warmup, read_chunk, write_response
from oasr_backend.types import ChunkResult

logger = logging.getLogger(__name__)
_REAP_INTERVAL_S = 1.0


class TritonModel:
    """What `model.py` delegates to. One engine per instance, one instance per GPU."""

    def __init__(self, args: Mapping[str, str]) -> None:
        """`args` are those of Triton's `initialize`. Raises ConfigError; the load then fails."""
        _log_through_triton()
        parameters = json.loads(args["model_config"]).get("parameters", {})
        config = ServingConfig.from_parameters(
            merged_parameters({name: value["string_value"] for name, value in parameters.items()})
        )
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        model_dir = Path(args["model_repository"])
        checkpoint_dir = config.resolve_checkpoint(model_dir)
        device = _device(config.device, args)
        self._engine = Engine.load(checkpoint_dir, config, device=device)
        self._reaper = Periodic(self._engine.close_idle, interval_s=_REAP_INTERVAL_S)
        logger.info(
            "serving %s on %s for at most %d streams",
            checkpoint_dir,
            device,
            self._engine.config.max_streams,
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request, in order; a warm-up request is answered and forgotten."""
        live = [request for request in requests if not is_warmup(request)]
        results = iter(self._engine.process([read_chunk(request) for request in live]))
        return [
            write_response(ChunkResult() if is_warmup(request) else next(results))
            for request in requests
        ]

    def close(self) -> None:
        self._reaper.stop()
        self._engine.close()


class Periodic:
    """Calls `action` every `interval_s` on a background thread until stopped."""

    def __init__(self, action: Callable[[], object], *, interval_s: float) -> None:
        self._action = action
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oasr-reaper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._action()
            except Exception:
                logger.exception("the reaper failed; it tries again in %g s", self._interval_s)


def _device(choice: str, args: Mapping[str, str]) -> str:
    """The instance's own GPU where it has one, unless the configuration names a device."""
    if choice != "auto":
        return choice
    if args["model_instance_kind"] == "GPU":
        return f"cuda:{args['model_instance_device_id']}"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _log_through_triton() -> None:
    package_logger = logging.getLogger("oasr_backend")
    package_logger.setLevel(logging.INFO)
    package_logger.handlers = [TritonLogHandler()]
    package_logger.propagate = False
