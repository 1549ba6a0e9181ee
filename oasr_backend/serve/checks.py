"""What commonly keeps the server from starting or answering, each with its remedy.

Every check returns the problems that it finds, so that all of them can be shown at once.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from oasr_backend.config import KEYS, ServingConfig
from oasr_backend.errors import ConfigError
from oasr_backend.serve.command import SHM_REGION_BYTES, ServerSettings
from oasr_backend.serve.cores import TASKSET, count_gpus
from oasr_backend.serve.embedded import (
    LIBPYTHON_NAME,
    PYTHON_TAG,
    TritonInstall,
    find_libpython,
)
from oasr_backend.serve.overrides import CHECKPOINT_KEY, parameters_of, unknown_names
from oasr_backend.serve.ports import bind_error
from oasr_backend.serve.repository import ModelConfig, model_directories, read_models
from oasr_backend.serve.shm import SHM_DIRECTORY
from oasr_backend.serve.stack import (
    STACK_BYTES,
    address_space_bytes,
    hard_limit_bytes,
    is_reserved_whole,
)
from oasr_backend.triton_backend.overrides import (
    OVERRIDES_VARIABLE,
    merge_overrides,
    read_overrides,
    split_name,
)

# Room for one request in shared memory: 1 s of FP32 samples at 16 kHz.
REQUEST_BYTES = 16_000 * 4
# A checkpoint folder in WeNet's layout.
CHECKPOINT_FILES = ("train.yaml", "final.pt", "units.txt")
# And one in icefall's, where the first may be a file of training such as epoch-30.pt.
ICEFALL_FILES = ("pretrained.pt", "tokens.txt")
ICEFALL_WEIGHTS = ("pretrained.pt", "epoch-*.pt", "checkpoint-*.pt")
# Entry points of `checkpoints/installed.py`, which would take the time that PyTorch's import takes.
READERS = "oasr_backend.readers"
_MIB = 1 << 20

CheckName = Literal[
    "numpy",
    "torch",
    "package",
    "libpython",
    "stub",
    "stack",
    "cores",
    "port",
    "model-repository",
    "setting",
    "checkpoint",
    "shm",
    "load",
]
CHECK_NAMES: tuple[CheckName, ...] = get_args(CheckName)


@dataclass(frozen=True, slots=True)
class Problem:
    """`name` is stable and short (`--skip-check NAME`); the texts are one line each.

    A message that ends with its own remedy needs no other.
    """

    name: CheckName
    message: str
    remedy: str = ""


def find_problems(install: TritonInstall, settings: ServerSettings) -> list[Problem]:
    """Run every check for this server with these settings."""
    problems = [*check_numpy(), *check_torch(), *check_package()]
    problems += [*check_libpython(install), *check_stub(install)]
    problems += check_stack()
    problems += check_ports(settings.host, settings.ports)
    problems += check_model_repository(settings.model_repository)
    configs = read_models(settings.model_repository, settings.instances)
    # The embedded server knows of no GPU, and counts its instances once.
    num_gpus = count_gpus() if install.wheel_root is None else 0
    num_instances = sum(config.num_instances(num_gpus) for config in configs)
    problems += check_instance_cores(settings, num_instances)
    overrides = merge_overrides(read_overrides(), settings.overrides)
    inherited = {name: text for name, text in overrides.items() if name not in settings.overrides}
    problems += check_settings(configs, settings.overrides)
    problems += check_inherited(configs, inherited)
    problems += check_checkpoints(configs, overrides)
    problems += check_shared_memory(shared_memory_need_bytes(configs))
    return problems


def check_numpy(version: str | None = None) -> list[Problem]:
    """numpy 2 loses outputs without a warning. `version` None: the installed one."""
    if version is None:
        try:
            version = importlib.metadata.version("numpy")
        except importlib.metadata.PackageNotFoundError:
            return [Problem("numpy", "numpy is not installed", "run `pip install 'numpy<2'`")]
    if int(version.partition(".")[0]) < 2:
        return []
    message = f"numpy {version} is installed; with numpy 2 this Triton sends every output empty"
    return [Problem("numpy", message, "run `pip install 'numpy<2'`")]


def check_torch() -> list[Problem]:
    if importlib.util.find_spec("torch") is not None:
        return []
    return [Problem("torch", "PyTorch is not installed", "run `pip install 'torch>=2.4'`")]


def check_package(distribution: str = "oasr-backend") -> list[Problem]:
    """The model runs in another process, which sees installed packages only."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        message = f"{distribution} is not installed for {sys.executable}, so no model can import it"
        return [Problem("package", message, "run `pip install -e .` in the checkout")]
    return []


def check_libpython(install: TritonInstall) -> list[Problem]:
    """The embedded server's stub is linked against the shared library of its Python."""
    if install.wheel_root is None or find_libpython() is not None:
        return []
    remedy = (
        f"install the package libpython{PYTHON_TAG} (Debian, Ubuntu) or use a Python that was "
        "built with --enable-shared"
    )
    return [Problem("libpython", f"{LIBPYTHON_NAME} of the running Python is missing", remedy)]


def check_stub(install: TritonInstall) -> list[Problem]:
    if install.stub is None or install.stub.is_file():
        return []
    stubs = install.stub.parents[1]
    versions = sorted(path.name for path in stubs.iterdir()) if stubs.is_dir() else []
    known = ", ".join(versions) or "none"
    message = f"the embedded tritonserver has no stub for Python {PYTHON_TAG} (it has: {known})"
    remedy = "use one of those Python versions, or `pip install nvidia-pytriton==0.7.0` again"
    return [Problem("stub", message, remedy)]


def check_stack() -> list[Problem]:
    """A thread of the server can have the stack that the largest requests take."""
    hard, space = hard_limit_bytes(), address_space_bytes()
    problems = []
    if hard is not None and hard < STACK_BYTES:
        message = f"a thread may have {hard // _MIB} MiB of stack (`ulimit -Hs`)"
        remedy = "allow 1 GiB: `--ulimit stack=1073741824` for a container, LimitSTACK=1G in a unit"
        problems.append(_stack_problem(message, remedy))
    if space is not None:
        message = f"all threads together may have {space // _MIB} MiB (`ulimit -v`)"
        problems.append(_stack_problem(message, "lift that limit by `ulimit -v unlimited`"))
    if is_reserved_whole():
        message = "vm.overcommit_memory is 2, so the kernel reserves the stack of a thread whole"
        problems.append(_stack_problem(message, "run `sysctl vm.overcommit_memory=0`"))
    return problems


def _stack_problem(message: str, remedy: str) -> Problem:
    return Problem("stack", f"{message}, and a large HTTP request can end the server", remedy)


def check_instance_cores(settings: ServerSettings, num_instances: int) -> list[Problem]:
    """taskset is there, each instance gets a core, and nothing else places the instances."""
    cores = settings.instance_cores
    if cores is None:
        return []
    problems = []
    if shutil.which(TASKSET) is None:
        message = f"--instance-cores needs {TASKSET}, which is not on PATH"
        problems.append(Problem("cores", message, "install the package util-linux"))
    if given := [flag for flag in settings.extra_flags if flag.startswith("--host-policy")]:
        message = f"{given[0]} would undo --instance-cores"
        problems.append(Problem("cores", message, "give one of the two"))
    if len(cores) < num_instances:
        message = (
            f"--instance-cores names too few cores for {num_instances} instances: {len(cores)}"
        )
        remedy = (
            f"name {num_instances}, or have fewer by --instances or by count of instance_group in "
            "config.pbtxt"
        )
        problems.append(Problem("cores", message, remedy))
    return problems


def check_ports(host: str, ports: Mapping[str, int]) -> list[Problem]:
    """`ports` are keyed by the flag that sets them."""
    problems = [
        Problem("port", f"port {port} is given {count} times", "give each service its own port")
        for port, count in Counter(ports.values()).items()
        if count > 1
    ]
    for flag, port in ports.items():
        error = bind_error(host, port)
        if error is not None:
            problems.append(_port_problem(f"{host}:{port}", flag, error))
    return problems


def _port_problem(address: str, flag: str, error: OSError) -> Problem:
    if error.errno == errno.EADDRINUSE:
        remedy = f"stop what listens there or choose another port with {flag}"
        return Problem("port", f"{address} ({flag}) is in use", remedy)
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"choose a port above 1023 with {flag}"
        return Problem("port", f"{address} ({flag}) may not be opened by this user", remedy)
    reason = error.strerror or str(error)
    remedy = f"give an address of this machine with --host and a port with {flag}"
    return Problem("port", f"{address} ({flag}) cannot be opened: {reason}", remedy)


def check_model_repository(repository: Path) -> list[Problem]:
    remedy = "give the folder that holds oasr_streaming/ with --model-repository"
    if not repository.is_dir():
        message = f"the model repository {repository} is not a folder"
        return [Problem("model-repository", message, remedy)]
    directories = model_directories(repository)
    if not directories:
        message = f"no model in {repository}: no */config.pbtxt"
        return [Problem("model-repository", message, remedy)]
    return [
        Problem(
            "model-repository",
            f"the model {directory.name} has a config.pbtxt but no version folder with a model.py",
            f"copy the folder 1/ into {directory}",
        )
        for directory in directories
        if not any(directory.glob("[0-9]*/model.py"))
    ]


def check_settings(configs: Sequence[ModelConfig], overrides: Mapping[str, str]) -> list[Problem]:
    """Each override names a model of the repository and a key that it knows."""
    if not configs:
        return []
    return [Problem("setting", *texts) for texts in unknown_names(configs, overrides)]


def check_inherited(configs: Sequence[ModelConfig], inherited: Mapping[str, str]) -> list[Problem]:
    """Each override of the environment is one that --set would take, with a value of its kind."""
    problems = [*check_settings(configs, inherited), *_value_problems(configs, inherited)]
    return [
        replace(problem, message=f"{OVERRIDES_VARIABLE} of the environment: {problem.message}")
        for problem in problems
    ]


def _value_problems(
    configs: Sequence[ModelConfig], overrides: Mapping[str, str]
) -> Iterator[Problem]:
    ours = {config.name for config in configs if config.is_ours}
    for name, text in sorted(overrides.items()):
        model, key = split_name(name)
        if key not in KEYS or not (model in ours if model else ours):
            continue
        try:
            ServingConfig.from_parameters({key: text})
        except ConfigError as error:
            yield Problem("setting", str(error))


def check_checkpoints(
    configs: Sequence[ModelConfig], overrides: Mapping[str, str]
) -> list[Problem]:
    """The checkpoint of each model that has one; a relative path starts at the model's folder."""
    values = [
        (item.directory, parameters_of(item, overrides).get(CHECKPOINT_KEY)) for item in configs
    ]
    folders = {folder / Path(value).expanduser() for folder, value in values if value}
    return [problem for folder in sorted(folders) for problem in _checkpoint_problems(folder)]


def _checkpoint_problems(folder: Path) -> Iterator[Problem]:
    readers = sorted(point.name for point in importlib.metadata.entry_points(group=READERS))
    remedy = "give a folder with " + ", ".join(CHECKPOINT_FILES)
    remedy += ", or one with " + ", ".join(ICEFALL_FILES)
    if readers:
        remedy += f", or a checkpoint of an installed reader ({', '.join(readers)}),"
    remedy += " by --checkpoint"
    if not folder.exists():
        why = _what_stands_at(folder).removeprefix(f"{folder.name} ") or "does not exist"
        yield Problem("checkpoint", f"the checkpoint folder {folder} {why}", remedy)
    elif folder.is_dir() and not any(folder.iterdir()):
        yield Problem("checkpoint", f"the checkpoint folder {folder} is empty", remedy)
    elif not readers:
        # An installed reader may know any other layout, and names of files that are WeNet's too.
        yield from _wenet_problems(folder, remedy)


def _is_icefalls(folder: Path) -> bool:
    """Whether icefall's reader opens the folder, and a file of WeNet's there is left over."""
    config, *others = (os.path.lexists(folder / name) for name in CHECKPOINT_FILES)
    if config and any(others):
        return False
    has_weights = any(any(folder.glob(pattern)) for pattern in ICEFALL_WEIGHTS)
    return has_weights and os.path.lexists(folder / ICEFALL_FILES[1])


def _wenet_problems(path: Path, remedy: str) -> Iterator[Problem]:
    if path.is_file() and path.name in CHECKPOINT_FILES:
        remedy = f"give its folder {path.parent} by --checkpoint"
        yield Problem("checkpoint", f"the checkpoint {path} is a file, not a folder", remedy)
    missing = [name for name in CHECKPOINT_FILES if not _is_filled(path / name)]
    there = [name for name in CHECKPOINT_FILES if os.path.lexists(path / name)]
    if missing and there and not _is_icefalls(path):
        message = f"the checkpoint {path} lacks {', '.join(missing)} ({_why_missing(path)})"
        yield Problem("checkpoint", message, remedy)


def _why_missing(path: Path) -> str:
    whys = [text for name in CHECKPOINT_FILES if (text := _what_stands_at(path / name))]
    return "; ".join(whys) or "absent or empty"


def _what_stands_at(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"{path.name} is a link to {os.readlink(path)}, which is not there"
    return f"{path.name} is a folder" if path.is_dir() else ""


def _is_filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def shared_memory_need_bytes(configs: Sequence[ModelConfig]) -> int:
    """Bytes that full batches of every instance take: the first region, and its growth."""
    return sum(
        config.instance_count * (SHM_REGION_BYTES + config.max_batch_size * REQUEST_BYTES)
        for config in configs
    )


def check_shared_memory(need_bytes: int, *, directory: Path = SHM_DIRECTORY) -> list[Problem]:
    remedy = "start the container with `--shm-size=1g`, or remount /dev/shm with a larger size"
    if not directory.is_dir():
        return [Problem("shm", f"{directory} does not exist", remedy)]
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes >= need_bytes:
        return []
    message = (
        f"{directory} has {free_bytes // _MIB} MiB free, full batches need "
        f"{-(-need_bytes // _MIB)} MiB"
    )
    return [Problem("shm", message, remedy)]
