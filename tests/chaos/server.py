"""A private server whose idle limits are short, so that what is abandoned comes back soon."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from oasr_backend.serve.process import TritonServer, local_settings

MODEL_NAME = "oasr_streaming"
MODEL_DIR = Path(__file__).resolve().parents[2] / "model_repository" / MODEL_NAME
_READY_TIMEOUT_S = 180.0
_IDLE = re.compile(r"(max_sequence_idle_microseconds:\s*)\d+")


@dataclass(frozen=True)
class Limits:
    """`stream_idle_s` is the backend's own limit and must exceed Triton's."""

    max_streams: int
    triton_idle_s: float
    stream_idle_s: float
    overrides: dict[str, str] = field(default_factory=dict)


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
        repository = _copy_repository(Path(folder), triton_idle_s=limits.triton_idle_s)
        with TritonServer(local_settings(repository, overrides=overrides)) as server:
            server.wait_ready(_READY_TIMEOUT_S)
            yield server


def _copy_repository(folder: Path, *, triton_idle_s: float) -> Path:
    """Configuration and model.py; the checkpoint is read where it lies."""
    config = (MODEL_DIR / "config.pbtxt").read_text(encoding="utf-8")
    config, found = _IDLE.subn(rf"\g<1>{round(triton_idle_s * 1e6)}", config)
    if found != 1:
        raise ValueError(f"max_sequence_idle_microseconds stands {found} times in config.pbtxt")
    model = folder / MODEL_NAME
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config, encoding="utf-8")
    source = (MODEL_DIR / "1" / "model.py").read_text(encoding="utf-8")
    (model / "1" / "model.py").write_text(source, encoding="utf-8")
    return folder
