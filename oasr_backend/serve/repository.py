"""What `oasr-serve` needs to know of a model repository before a server reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import oasr_backend

_MAX_BATCH_SIZE = re.compile(r"^\s*max_batch_size\s*:\s*(\d+)", re.MULTILINE)
_INSTANCE_COUNT = re.compile(r"\bcount\s*:\s*(\d+)")
_PARAMETER = re.compile(
    r'key\s*:\s*"(?P<key>[^"]+)"\s*,?\s*'
    r'value\s*:?\s*\{\s*string_value\s*:\s*"(?P<value>[^"]*)"\s*\}'
)
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The few entries of a config.pbtxt that decide what a server needs from the machine."""

    directory: Path
    max_batch_size: int
    instance_count: int
    parameters: dict[str, str]

    @property
    def name(self) -> str:
        return self.directory.name


def read_model_config(model_directory: Path) -> ModelConfig:
    text = _COMMENT.sub("", (model_directory / "config.pbtxt").read_text(encoding="utf-8"))
    batch, count = _MAX_BATCH_SIZE.search(text), _INSTANCE_COUNT.search(text)
    return ModelConfig(
        directory=model_directory,
        max_batch_size=int(batch[1]) if batch else 1,
        instance_count=int(count[1]) if count else 1,
        parameters={match["key"]: match["value"] for match in _PARAMETER.finditer(text)},
    )


def model_directories(model_repository: Path) -> list[Path]:
    """Folders with a config.pbtxt: the models that Triton loads at start."""
    if not model_repository.is_dir():
        return []
    return sorted(path.parent for path in model_repository.glob("*/config.pbtxt"))


def model_names(model_repository: Path) -> list[str]:
    return [directory.name for directory in model_directories(model_repository)]


def default_model_repository() -> Path:
    """`model_repository` beside the package (a checkout), else in the working directory."""
    beside_package = Path(oasr_backend.__file__).resolve().parents[1] / "model_repository"
    return beside_package if beside_package.is_dir() else Path.cwd() / "model_repository"
