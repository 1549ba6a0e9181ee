"""Processor cores that the model's instances have to themselves.

An instance is two busy threads that wait for each other by turns: tritonserver's, which writes
requests and sends answers, and the model's process. Where other threads share their core, both
wait, and the list of requests behind them grows. Triton's host policies place the two; taskset
keeps tritonserver's other threads away (`docs/LOG.md` has what it is worth).
"""

from __future__ import annotations

import os
import re
from collections.abc import Set
from pathlib import Path

from oasr_backend.errors import ConfigError

_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
TASKSET = "taskset"
_DEVICES = Path("/dev")


def parse_instance_cores(text: str, usable: Set[int] | None = None) -> range:
    """The cores that `FIRST-LAST` or a single number names.

    usable: the cores that this process may run on; None asks the kernel.

    Raises ConfigError when the text names no cores, one that is not usable, or all that are.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    match = _RANGE.fullmatch(text.strip())
    cores = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not cores:
        raise ConfigError(f"instance cores {text!r} name no cores; give one, as 0, or some, as 0-3")
    if not all(core in usable for core in cores):
        raise ConfigError(
            f"instance cores {text!r} are not all among the cores of this machine that may be "
            f"used, {format_cores(usable)}; choose from those"
        )
    if len(cores) == len(usable):
        raise ConfigError(
            f"instance cores {text!r} leave tritonserver none of {format_cores(usable)}; give "
            "fewer, one for each instance"
        )
    return cores


def host_policies(cores: range, num_gpus: int | None = None) -> list[str]:
    """Flags that put instances on `cores`, whichever device they have.

    num_gpus: how many GPUs instances may have; None looks in /dev.
    """
    num_gpus = count_gpus() if num_gpus is None else num_gpus
    names = ["cpu", *(f"gpu_{number}" for number in range(num_gpus))]
    # Triton takes no single number here.
    return [f"--host-policy={name},cpu-cores={cores[0]}-{cores[-1]}" for name in names]


def elsewhere(cores: range) -> list[str]:
    """A command's first words: it runs on the usable cores that are not among `cores`."""
    return [TASKSET, "--cpu-list", format_cores(os.sched_getaffinity(0).difference(cores))]


def format_cores(cores: Set[int]) -> str:
    """As taskset writes them: `0,2-5`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def count_gpus(devices: Path = _DEVICES) -> int:
    """NVIDIA GPUs with a device file here; a container has those of its own."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia*"))
