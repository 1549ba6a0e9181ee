"""Reads what `oasr-serve` needs of a model repository before a server does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import oasr_backend
from oasr_backend.serve.pbtxt import instance_groups

_MAX_BATCH_SIZE = re.compile(r"^\s*max_batch_size\s*:\s*(\d+)", re.MULTILINE)
_CPU_ONLY = re.compile(r"\bkind\s*:\s*KIND_CPU\b")
_PARAMETER = re.compile(
    r'key\s*:\s*"(?P<key>[^"]+)"\s*,?\s*'
    r'value\s*:?\s*\{\s*string_value\s*:\s*"(?P<value>[^"]*)"\s*\}'
)
_IDLE_US = re.compile(r"\bmax_sequence_idle_microseconds\s*:\s*(\d+)")
_OLDEST = re.compile(r"\boldest\s*:?\s*\{(?P<fields>[^}]*)\}")
_CANDIDATES = re.compile(r"\bmax_candidate_sequences\s*:\s*(\d+)")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The few entries of a config.pbtxt that decide what a server needs from the machine."""

    directory: Path
    max_batch_size: int
    instance_count: int
    is_cpu_only: bool
    parameters: dict[str, str]
    sequence_batching: dict[str, Any]
    # Whether its model.py, or else its checkpoint, shows that this backend serves it.
    is_ours: bool = False
    # Of instance_group; 0: config.pbtxt leaves them to Triton.
    num_groups: int = 1

    @property
    def name(self) -> str:
        return self.directory.name

    def num_instances(self, num_gpus: int) -> int:
        """How many a tritonserver that sees `num_gpus` GPUs starts: the same count on each."""
        return self.instance_count * (1 if self.is_cpu_only else max(1, num_gpus))

    @property
    def triton_arguments(self) -> dict[str, str]:
        """The arguments of the model's `initialize` that a load depends on."""
        parameters = {key: {"string_value": text} for key, text in self.parameters.items()}
        config = {
            "parameters": parameters,
            "sequence_batching": self.sequence_batching,
            "instance_group": [{"count": self.instance_count}],
        }
        return {
            "model_config": json.dumps(config),
            "model_name": self.name,
            "model_repository": str(self.directory.resolve()),
            "model_instance_name": f"{self.name}_0_0",
            "model_instance_kind": "AUTO",
            "model_instance_device_id": "0",
        }


def read_model_config(model_directory: Path) -> ModelConfig:
    text = _COMMENT.sub("", (model_directory / "config.pbtxt").read_text(encoding="utf-8"))
    batch, groups = _MAX_BATCH_SIZE.search(text), instance_groups(text)
    parameters = {match["key"]: match["value"] for match in _PARAMETER.finditer(text)}
    return ModelConfig(
        directory=model_directory,
        max_batch_size=int(batch[1]) if batch else 1,
        instance_count=sum(group.count for group in groups) if groups else 1,
        is_cpu_only=_CPU_ONLY.search(text) is not None,
        parameters=parameters,
        sequence_batching=_sequence_batching(text),
        is_ours="checkpoint_dir" in parameters or _imports_us(model_directory),
        num_groups=len(groups),
    )


def _imports_us(model_directory: Path) -> bool:
    shells = model_directory.glob("[0-9]*/model.py")
    return any(b"oasr_backend" in shell.read_bytes() for shell in shells)


def _sequence_batching(text: str) -> dict[str, Any]:
    """Fields follow Triton's JSON: 64-bit numbers are strings there, and 0 stands for no value."""
    idle, oldest = _IDLE_US.search(text), _OLDEST.search(text)
    found: dict[str, Any] = {"max_sequence_idle_microseconds": idle[1] if idle else "0"}
    if oldest:
        candidates = _CANDIDATES.search(oldest["fields"])
        found["oldest"] = {"max_candidate_sequences": int(candidates[1]) if candidates else 0}
    return found


def model_directories(model_repository: Path) -> list[Path]:
    """Folders with a config.pbtxt: the models that Triton loads at start."""
    if not model_repository.is_dir():
        return []
    return sorted(path.parent for path in model_repository.glob("*/config.pbtxt"))


def read_models(
    model_repository: Path, instances: Mapping[str, int] | None = None
) -> list[ModelConfig]:
    """What the models need; `instances` are those that a server starts instead, by model."""
    configs = [read_model_config(path) for path in model_directories(model_repository)]
    counts = instances or {}
    return [
        replace(one, instance_count=counts.get(one.name, one.instance_count)) for one in configs
    ]


def model_names(model_repository: Path) -> list[str]:
    return [directory.name for directory in model_directories(model_repository)]


def default_model_repository() -> Path:
    """`model_repository` beside the package (a checkout), else in the working directory."""
    beside_package = Path(oasr_backend.__file__).resolve().parents[1] / "model_repository"
    return beside_package if beside_package.is_dir() else Path.cwd() / "model_repository"
