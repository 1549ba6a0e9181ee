from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from oasr_backend.errors import ServerError
from oasr_backend.serve.embedded import (
    STUB_NAME,
    TritonInstall,
    find_libpython,
    find_triton,
    prepare_backend_directory,
)


@pytest.fixture(name="wheel")
def _wheel(monkeypatch: pytest.MonkeyPatch) -> TritonInstall:
    """The embedded server, even where another one is on PATH."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    return find_triton()


def test_the_embedded_server_is_found_without_importing_its_package(wheel: TritonInstall) -> None:
    assert wheel.binary.is_file()
    assert wheel.wheel_root is not None
    assert "pytriton" not in sys.modules


def test_a_tritonserver_on_path_wins_and_keeps_its_own_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    install = find_triton()
    assert install == TritonInstall(binary)
    assert prepare_backend_directory(install) is None
    assert install.library_directories == ()


def test_no_server_at_all_is_an_error_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ServerError, match=r"pip install nvidia-pytriton==0\.7\.0"):
        find_triton()


def test_the_backend_directory_holds_what_the_python_backend_loads(
    wheel: TritonInstall, tmp_path: Path
) -> None:
    directory = prepare_backend_directory(wheel, tmp_path)
    assert directory is not None
    assert {path.name for path in (directory / "python").iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        STUB_NAME,
    }
    assert (directory / "python" / STUB_NAME).stat().st_mode & 0o111


def test_a_second_start_uses_the_same_backend_directory(
    wheel: TritonInstall, tmp_path: Path
) -> None:
    first = prepare_backend_directory(wheel, tmp_path)
    assert first is not None
    written = (first / "python" / STUB_NAME).stat().st_mtime_ns
    assert prepare_backend_directory(wheel, tmp_path) == first
    assert (first / "python" / STUB_NAME).stat().st_mtime_ns == written


def test_concurrent_starts_share_one_complete_backend_directory(
    wheel: TritonInstall, tmp_path: Path
) -> None:
    barrier = threading.Barrier(8)
    found: list[Path] = []

    def prepare() -> None:
        barrier.wait()
        directory = prepare_backend_directory(wheel, tmp_path)
        assert directory is not None
        found.append(directory)

    threads = [threading.Thread(target=prepare) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert [path.name for path in (tmp_path / "backends").iterdir()] == [found[0].name]
    assert len(list((found[0] / "python").iterdir())) == 3


def test_a_damaged_backend_directory_is_built_again(wheel: TritonInstall, tmp_path: Path) -> None:
    directory = prepare_backend_directory(wheel, tmp_path)
    assert directory is not None
    (directory / "python" / "libtriton_python.so").write_bytes(b"cut short")
    assert prepare_backend_directory(wheel, tmp_path) == directory
    assert (directory / "python" / "libtriton_python.so").stat().st_size > 100_000


def test_a_wheel_without_its_stub_is_an_error_that_names_the_file(
    wheel: TritonInstall, tmp_path: Path
) -> None:
    assert wheel.wheel_root is not None
    root = tmp_path / "tritonserver"
    shutil.copytree(wheel.wheel_root / "backends", root / "backends")
    damaged = TritonInstall(wheel.binary, wheel_root=root)
    with pytest.raises(ServerError, match=STUB_NAME):
        prepare_backend_directory(damaged, tmp_path)


def test_the_library_path_covers_the_wheel_and_libpython(wheel: TritonInstall) -> None:
    libpython = find_libpython()
    assert libpython is not None
    libraries, python_folder = wheel.library_directories
    assert list(libraries.glob("libtritonserver*.so"))
    assert python_folder == libpython.parent
