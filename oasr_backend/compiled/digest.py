"""A name for a compiled encoder: another one as soon as anything that it follows from differs."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from oasr_backend.compiled.exporter import StepShape
from oasr_backend.models.base import StreamingEncoder

_PACKAGES = ("torch", "onnx", "onnxruntime")
_PACKAGE = Path(__file__).parents[1]
_ROOMS = ("cache", "compiled", "kernels", "models")
_PLAIN = (bool, int, float, str, bytes, type(None))


def graph_digest(encoder: StreamingEncoder, shape: StepShape) -> str:
    """Of the weights, tables, options and code of the encoder, the sizes, and the exporter.

    Raises PackageNotFoundError where onnx or onnxruntime is not installed.
    """
    told = hashlib.blake2b(digest_size=16)
    for part in (shape, encoder.spec, *((name, version(name)) for name in _PACKAGES)):
        told.update(repr(part).encode())
    for path in sorted(_sources(encoder)):
        told.update(path.read_bytes())
    for name, module in encoder.named_modules():
        told.update(f"{name}: {type(module).__qualname__} {_options(module)}".encode())
    for name, tensor in (*encoder.named_parameters(), *encoder.named_buffers()):
        told.update(f"{name}: {tuple(tensor.shape)} {tensor.dtype}".encode())
        told.update(tensor.detach().contiguous().cpu().numpy().data)
    return told.hexdigest()


def _sources(encoder: nn.Module) -> Iterable[Path]:
    """The files whose code is traced or traces."""
    found = {path for room in _ROOMS for path in (_PACKAGE / room).rglob("*.py")}
    for module in encoder.modules():
        if not type(module).__module__.startswith("torch."):
            found.add(Path(inspect.getfile(type(module))))
    return found


def _options(module: nn.Module) -> str:
    """What the module holds beside tensors and modules, as far as it is told without an address."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return ", ".join(f"{name}={_told(value)}" for name, value in sorted(own.items()))


def _told(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_told, value))})"
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if is_dataclass(value):
        return f"{type(value).__qualname__}{_told(sorted(vars(value).items()))}"
    return type(value).__qualname__
