"""Finds a tritonserver and prepares what the embedded one needs around it.

Two servers are known. A `tritonserver` on PATH (the NGC container) brings its own backends. The
one inside the nvidia-pytriton wheel keeps its Python backend and one stub per Python version in
different folders, so a backend directory is put together for the running Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oasr_backend.errors import ServerError
from oasr_backend.folders import cache_root

PYTHON_TAG = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBPYTHON_NAME = f"libpython{PYTHON_TAG}.so.1.0"
STUB_NAME = "triton_python_backend_stub"
_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """Where a tritonserver lives. `wheel_root` is the wheel's `tritonserver` folder, if it is one.

    A server without `wheel_root` knows its own backends and libraries.
    """

    binary: Path
    wheel_root: Path | None = None

    @property
    def stub(self) -> Path | None:
        """The stub of the running Python inside the wheel; the file need not exist."""
        if self.wheel_root is None:
            return None
        return self.wheel_root / "python_backend_stubs" / PYTHON_TAG / STUB_NAME

    @property
    def library_directories(self) -> tuple[Path, ...]:
        """What goes on LD_LIBRARY_PATH, in front of what is there already."""
        if self.wheel_root is None:
            return ()
        libpython = find_libpython()
        libraries = wheel_libraries(self.wheel_root)
        return (libraries,) if libpython is None else (libraries, libpython.parent)


def wheel_libraries(wheel_root: Path) -> Path:
    """The folder of the shared libraries that the wheel brings, beside its package."""
    return wheel_root.parents[1] / "nvidia_pytriton.libs"


def find_triton() -> TritonInstall:
    """The tritonserver on PATH, else the embedded one. Raises ServerError when there is none."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonInstall(Path(on_path))
    embedded = find_embedded()
    if embedded is not None:
        return embedded
    raise ServerError(
        "no tritonserver: neither on PATH nor in the Python environment "
        f"{sys.prefix}; run `pip install nvidia-pytriton==0.7.0`"
    )


def find_embedded() -> TritonInstall | None:
    """The server of the nvidia-pytriton wheel in this Python environment."""
    # Importing pytriton would start its own logging and signal handling; only its place matters.
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(location) / "tritonserver"
        binary = root / "bin" / "tritonserver"
        if binary.is_file():
            return TritonInstall(binary, wheel_root=root)
    return None


def find_libpython() -> Path | None:
    """The shared library of the running Python, which the stub is linked against."""
    # LIBDIR of a relocated Python (conda, uv) still names the machine it was built on.
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        os.path.join(sys.base_prefix, "lib"),
        sysconfig.get_config_var("LIBPL"),
        f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}",
        "/usr/lib64",
        "/usr/local/lib",
    ]
    candidates = (Path(folder) / LIBPYTHON_NAME for folder in folders if folder)
    return next((path for path in candidates if path.is_file()), None)


def prepare_backend_directory(install: TritonInstall, root: Path | None = None) -> Path | None:
    """A folder for `--backend-directory`; None when the server brings its own backends.

    The folder's name is a digest of its files: servers that start at the same time build it
    twice and keep one, and another version of the wheel gets another folder.
    """
    if install.wheel_root is None or install.stub is None:
        return None
    backend = install.wheel_root / "backends" / "python"
    sources = [*(backend / name for name in _BACKEND_FILES), install.stub]
    contents = {source.name: _read(source) for source in sources}
    target = (root or cache_root()) / "backends" / _digest(contents)
    if not _is_complete(target, contents):
        _build(target, contents)
    return target


def _read(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except OSError as error:
        raise ServerError(
            f"the embedded tritonserver lacks {source}: {error.strerror}; "
            "run `pip install --force-reinstall nvidia-pytriton==0.7.0`"
        ) from error


def _digest(contents: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(name.encode() + hashlib.sha256(contents[name]).digest())
    return digest.hexdigest()[:16]


def _is_complete(target: Path, contents: dict[str, bytes]) -> bool:
    files = {name: target / "python" / name for name in contents}
    return all(
        path.is_file() and path.stat().st_size == len(contents[name])
        for name, path in files.items()
    )


def _build(target: Path, contents: dict[str, bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        (staging / "python").mkdir()
        for name, content in contents.items():
            (staging / "python" / name).write_bytes(content)
        (staging / "python" / STUB_NAME).chmod(0o755)
        put_in_place(staging, target, lambda: _is_complete(target, contents))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def put_in_place(staging: Path, target: Path, is_complete: Callable[[], bool]) -> None:
    """Renames a folder that is ready, unless `target` is complete. Raises ServerError."""
    for _ in range(10):
        try:
            staging.rename(target)
        except OSError:
            # Another process was faster, or a damaged folder is in the way.
            if is_complete():
                return
            shutil.rmtree(target, ignore_errors=True)
        else:
            return
    raise ServerError(f"cannot write the folder {target}; free or remove that path")
