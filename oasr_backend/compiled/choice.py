"""The encoder that a CPU serves: compiled where that can be done, else as it came."""

from __future__ import annotations

import logging
import time
from importlib.util import find_spec
from pathlib import Path

from oasr_backend.compiled.digest import graph_digest
from oasr_backend.compiled.encoder import SessionEncoder
from oasr_backend.compiled.exporter import StepShape, write_graph
from oasr_backend.compiled.files import GraphFiles
from oasr_backend.compiled.large_tensors import split_large_tensors
from oasr_backend.compiled.quantised import write_quantised
from oasr_backend.compiled.session import open_session
from oasr_backend.compiled.trial import BRIEF, WHOLE, Steps, relative_error
from oasr_backend.errors import ConfigError
from oasr_backend.models.base import StreamingEncoder

logger = logging.getLogger(__name__)

AUTO, ONNX, ONNX_INT8, PYTORCH = "auto", "onnx", "onnx_int8", "pytorch"
#: Largest relative error of a trial; float32 differs by the order of additions alone.
MOST_ERROR = {ONNX: 1e-4, ONNX_INT8: 0.1}


class _NotCompiledError(Exception):
    """Why an encoder is served as it came."""


class _NotMadeYetError(_NotCompiledError):
    """That is no fault."""


def compiled_encoder(  # noqa: PLR0913 - two have a default
    encoder: StreamingEncoder,
    *,
    choice: str,
    chunk_frames: int,
    window_frames: int,
    num_features: int,
    may_export: bool = True,
    files: GraphFiles | None = None,
) -> StreamingEncoder:
    """The encoder as a compiled graph, or `encoder` itself where `choice` allows that.

    choice         "onnx": compiled, in float32; "onnx_int8": its linear layers in 8 bits; "auto":
                   as "onnx", or eager where it cannot be compiled; "pytorch": eager
    chunk_frames   encoder frames of a step
    window_frames  feature frames of a step, of `num_features` values each
    may_export     whether a graph is made where none is kept, which takes some seconds

    `encoder` lies on the host in float32, its positions tabulated. It is not needed any more when
    another one is returned. Raises ConfigError where an explicit choice cannot be honoured.
    """
    if choice == PYTORCH:
        logger.info("event=encoder_eager reason=cpu_encoder=pytorch")
        return encoder
    kind = ONNX if choice == AUTO else choice
    if kind not in MOST_ERROR:
        known = ", ".join((AUTO, ONNX, ONNX_INT8, PYTORCH))
        raise ConfigError(f"cpu_encoder={choice!r} is not known; give one of {known}")
    shape = StepShape(chunk_frames, window_frames, num_features)
    try:
        return _compiled(encoder, kind, shape, files or GraphFiles(), may_export=may_export)
    except _NotCompiledError as error:
        if choice == AUTO:
            level = logging.INFO if isinstance(error, _NotMadeYetError) else logging.WARNING
            logger.log(level, "event=encoder_eager reason=%s", error)
            return encoder
        raise ConfigError(
            f"cpu_encoder={choice}: {error}; mend that, or set cpu_encoder=auto or pytorch"
        ) from error


def lacks_graph(encoder: StreamingEncoder, choice: str) -> bool:
    """Whether a graph could yet be made and kept, to serve in the place of this encoder."""
    can_be_run = not _missing_packages() and GraphFiles().is_writable
    return choice == AUTO and not isinstance(encoder, SessionEncoder) and can_be_run


def _missing_packages() -> list[str]:
    return [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]


def _compiled(
    encoder: StreamingEncoder, kind: str, shape: StepShape, files: GraphFiles, *, may_export: bool
) -> SessionEncoder:
    """Raises _NotCompiledError."""
    if missing := _missing_packages():
        raise _NotCompiledError(
            f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}"
        )
    began = time.monotonic()
    name = f"{graph_digest(encoder, shape)}{'' if kind == ONNX else '.int8'}.onnx"
    kept = files.find(name)
    if kept is not None:
        compiled = _tried(encoder, kept, kind, shape, BRIEF)
        _log(kind, "kept file", began)
        return compiled
    if not may_export:
        raise _NotMadeYetError("its graph is not made yet")
    try:
        with files.staging() as folder:
            path = folder / name
            _write(encoder, kind, shape, path)
            compiled = _tried(encoder, path, kind, shape, WHOLE)
            files.keep(path)
    except OSError as error:
        raise _NotCompiledError(
            f"its graph cannot be written ({error}); make room, or set XDG_CACHE_HOME to a folder "
            "that has some"
        ) from error
    _log(kind, "exported", began)
    return compiled


def _log(kind: str, origin: str, began: float) -> None:
    seconds = time.monotonic() - began
    logger.info("event=encoder_compiled kind=%s origin=%r seconds=%.2f", kind, origin, seconds)


def _write(encoder: StreamingEncoder, kind: str, shape: StepShape, path: Path) -> None:
    """Writes the graph. Raises OSError, and _NotCompiledError for what stops the exporter."""
    write = write_graph if kind == ONNX else write_quantised
    try:
        write(encoder, shape, path)
        split_large_tensors(path)
    except OSError:
        raise
    except Exception as error:
        logger.debug("event=encoder_not_exported", exc_info=error)
        raise _NotCompiledError(
            f"{type(encoder).__name__} was not exported: {_line(error)}"
        ) from error


def _tried(
    encoder: StreamingEncoder, path: Path, kind: str, shape: StepShape, steps: Steps
) -> SessionEncoder:
    """Raises _NotCompiledError for a file that cannot be run, or that computes something else."""
    try:
        compiled = SessionEncoder(open_session(path), encoder.spec, shape)
        error = relative_error(compiled, encoder, shape, steps)
    except Exception as failure:
        logger.debug("event=encoder_not_run", exc_info=failure)
        raise _NotCompiledError(f"its graph does not run: {_line(failure)}") from failure
    if not error <= MOST_ERROR[kind]:
        raise _NotCompiledError(
            f"its frames differ from PyTorch's by {error:.2g}, more than {MOST_ERROR[kind]:g}"
        )
    return compiled


def _line(error: Exception) -> str:
    """Its first line, and what kind it is of."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
