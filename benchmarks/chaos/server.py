"""A private server with short idle limits, so that abandoned streams come back soon."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from oasr_backend.serve.process import TritonServer, local_settings

MODEL_NAME = "oasr_streaming"
MODEL_DIR = Path(__file__).resolve().parents[2] / "model_repository" / MODEL_NAME
PROBED_MODEL = Path(__file__).parent / "model" / "probed_model.py"
FAULTY_MODEL = Path(__file__).parent / "model" / "faulty_model.py"
_READY_TIMEOUT_S = 180.0
_IDLE = re.compile(r"(max_sequence_idle_microseconds:\s*)\d+")


@dataclass(frozen=True)
class Limits:
    """`stream_idle_s` is the backend's own limit and must exceed Triton's.

    `model_py` is the shipped model or one built on it; `environment` is added to the server's, and
    `flags` to tritonserver's.
    """

    max_streams: int
    triton_idle_s: float
    stream_idle_s: float
    overrides: dict[str, str] = field(default_factory=dict)
    model_py: Path = PROBED_MODEL
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@contextmanager
def limited_server(limits: Limits) -> Iterator[TritonServer]:
    """A ready server; the model is the shipped one with other limits."""
    with tempfile.TemporaryDirectory(prefix="oasr-chaos-") as folder:
        overrides = {
            "checkpoint_dir": str(MODEL_DIR / "demo_en"),
            "max_streams": str(limits.max_streams),
            "stream_idle_timeout_s": str(limits.stream_idle_s),
            **limits.overrides,
        }
        repository = _write_repository(Path(folder), limits)
        with contextlib.ExitStack() as stack:
            with mock.patch.dict(os.environ, limits.environment):
                settings = local_settings(repository, overrides=overrides, extra_flags=limits.flags)
                server = stack.enter_context(TritonServer(settings))
            server.wait_ready(_READY_TIMEOUT_S)
            yield server


def _write_repository(folder: Path, limits: Limits) -> Path:
    """Configuration and model.py; the checkpoint is read where it lies."""
    config = (MODEL_DIR / "config.pbtxt").read_text(encoding="utf-8")
    config, found = _IDLE.subn(rf"\g<1>{round(limits.triton_idle_s * 1e6)}", config)
    if found != 1:
        raise ValueError(f"max_sequence_idle_microseconds stands {found} times in config.pbtxt")
    version = folder / MODEL_NAME / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
    shutil.copy(limits.model_py, version / "model.py")
    # Triton puts this folder on Python's path, so that the model can import the file.
    shutil.copy(PROBED_MODEL, version)
    return folder
