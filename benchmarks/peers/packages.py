"""The peer's packages, imported where they are used: nothing else in the project needs them."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

_REMEDY = "pip install 'oasr-backend[bench]'"
SERVER_BINARY = "sherpa-onnx-online-websocket-server"


class MissingPackageError(ImportError):
    """A package of the comparison is not installed."""


def require(name: str) -> Any:
    """The module. Raises MissingPackageError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"the comparison with sherpa-onnx needs the module {name} ({error}); {_REMEDY}"
        ) from error


def server_binary() -> Path:
    """sherpa-onnx's websocket server. Raises MissingPackageError when none is installed."""
    found = shutil.which(SERVER_BINARY, path=str(Path(sys.executable).parent)) or shutil.which(
        SERVER_BINARY
    )
    if found is None:
        raise MissingPackageError(
            f"{SERVER_BINARY} is neither beside {sys.executable} nor on PATH; {_REMEDY}"
        )
    return Path(found)
