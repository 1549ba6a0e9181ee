"""The command line and environment of a tritonserver process."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oasr_backend.serve.cores import elsewhere, host_policies
from oasr_backend.serve.derived import prepare_repository
from oasr_backend.serve.embedded import TritonInstall, prepare_backend_directory
from oasr_backend.serve.overrides import CHECKPOINT_KEY, parameters_of
from oasr_backend.serve.repository import read_models
from oasr_backend.serve.shm import new_region_prefix
from oasr_backend.serve.stack import with_deep_stacks
from oasr_backend.triton_backend.overrides import (
    OVERRIDES_VARIABLE,
    merge_overrides,
    read_overrides,
    write_overrides,
)

# Reserved at start for each model instance; it grows with the batches that arrive.
SHM_REGION_BYTES = 16 << 20
SHM_GROWTH_BYTES = 8 << 20
# What gRPC keeps of a call for the next one. Triton 24.10 uses what it has freed when more than
# these are open at once as streaming calls; no more memory is kept than calls were ever open.
GRPC_CALL_POOL = 1 << 16
EXIT_TIMEOUT_S = 10
# A load ends when the checkpoint is read and every batch size is warm.
LOAD_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What one server is asked to do. `extra_flags` come last, so they win over the others.

    overrides: by a key that counts for all models that know it, or by MODEL:key
    instances: how many a model has, for those that get another number than config.pbtxt says
    instance_cores: cores that nothing of the server but its instances runs on; None: any, all.
    """

    model_repository: Path
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    host: str = "127.0.0.1"
    overrides: Mapping[str, str] = field(default_factory=dict)
    extra_flags: Sequence[str] = ()
    instances: Mapping[str, int] = field(default_factory=dict)
    instance_cores: range | None = None
    shm_prefix: str = field(default_factory=new_region_prefix)

    @property
    def ports(self) -> dict[str, int]:
        """Port by the flag that sets it."""
        return {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
        }


def build_command(install: TritonInstall, settings: ServerSettings) -> list[str]:
    """The argument list. It prepares the folders that it names, so ServerError may be raised."""
    repository = prepare_repository(settings.model_repository, settings.instances)
    cores = settings.instance_cores
    command = with_deep_stacks()
    command += [] if cores is None else elsewhere(cores)
    command += [str(install.binary), f"--model-repository={repository}"]
    backends = prepare_backend_directory(install)
    if backends is not None:
        command.append(f"--backend-directory={backends}")
    command += [f"{flag}={port}" for flag, port in settings.ports.items()]
    command += [f"--{name}-address={settings.host}" for name in ("http", "grpc", "metrics")]
    # The shipped config.pbtxt is complete; completing it would load the model twice.
    command += ["--disable-auto-complete-config", f"--exit-timeout-secs={EXIT_TIMEOUT_S}"]
    command.append(f"--grpc-infer-allocation-pool-size={GRPC_CALL_POOL}")
    command += [f"--backend-config=python,{option}" for option in _backend_options(settings)]
    if cores is not None:
        command += host_policies(cores)
    return [*command, *settings.extra_flags]


def _backend_options(settings: ServerSettings) -> list[str]:
    return [
        f"stub-timeout-seconds={LOAD_TIMEOUT_S}",
        f"shm-default-byte-size={SHM_REGION_BYTES}",
        f"shm-growth-byte-size={SHM_GROWTH_BYTES}",
        f"shm-region-prefix-name={settings.shm_prefix}",
    ]


def build_environment(
    install: TritonInstall,
    settings: ServerSettings,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The caller's environment with PATH, LD_LIBRARY_PATH and the overrides added."""
    result = dict(os.environ if environment is None else environment)
    # The stub takes its packages from the first python3 on PATH and ignores PYTHONPATH.
    result["PATH"] = _prepend([Path(sys.executable).parent], result.get("PATH"))
    if install.library_directories:
        libraries = install.library_directories
        result["LD_LIBRARY_PATH"] = _prepend(libraries, result.get("LD_LIBRARY_PATH"))
    # OpenMP threads that spin while they wait take the cores from the server and from each other.
    result.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    overrides = merge_overrides(read_overrides(result), settings.overrides)
    overrides.update(_checkpoints(settings, overrides))
    if overrides:
        result[OVERRIDES_VARIABLE] = write_overrides(overrides)
    return result


def _checkpoints(settings: ServerSettings, overrides: Mapping[str, str]) -> dict[str, str]:
    """Checkpoints where the user has them, for models that Triton finds in another folder."""
    found = {}
    for config in read_models(settings.model_repository) if settings.instances else ():
        folder = parameters_of(config, overrides).get(CHECKPOINT_KEY)
        if config.name in settings.instances and folder:
            path = config.directory.resolve() / Path(folder).expanduser()
            found[f"{config.name}:{CHECKPOINT_KEY}"] = str(path)
    return found


def _prepend(folders: Sequence[Path], current: str | None) -> str:
    return os.pathsep.join([*map(str, folders), *([current] if current else [])])


def format_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A line for a shell: the variables that differ from the caller's, then the command."""
    changed = {
        name: value
        for name, value in environment.items()
        if name != "PATH" and os.environ.get(name) != value
    }
    changed["PATH"] = f"{Path(sys.executable).parent}:$PATH"
    assignments = [
        f'{name}="{value}"' if name == "PATH" else f"{name}={shlex.quote(value)}"
        for name, value in changed.items()
    ]
    return " ".join([*assignments, shlex.join(command)])
