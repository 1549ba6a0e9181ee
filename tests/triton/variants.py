"""The shipped model under other settings, loaded one by one into a single server."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tritonclient.http

from oasr_backend.serve.process import TritonServer
from tests.conftest import DEMO_DIR, GOLDEN_DIR, MODEL_REPOSITORY
from tests.guards import GUARD_S
from tests.triton.wire import Wire, metrics

SHIPPED = MODEL_REPOSITORY / "oasr_streaming"
GOLDEN = GOLDEN_DIR / "wenet_small"
_MODEL_PY = SHIPPED / "1" / "model.py"


@dataclass(frozen=True)
class Variant:
    """`parameters` replace or add to those of config.pbtxt; `more` is appended to its text."""

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    checkpoint_dir: Path = DEMO_DIR
    triton_idle_s: float = 60.0
    max_candidates: int = 16384
    more: str = ""
    model_py: Path = _MODEL_PY

    def write(self, repository: Path) -> None:
        folder = repository / self.name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(self._config(), encoding="utf-8")
        (folder / "1" / "model.py").write_text(
            self.model_py.read_text(encoding="utf-8"), encoding="utf-8"
        )

    def _config(self) -> str:
        text = (SHIPPED / "config.pbtxt").read_text(encoding="utf-8")
        text = replace_once(text, r"(idle_microseconds: )\d+", round(self.triton_idle_s * 1e6))
        text = replace_once(text, r"(max_candidate_sequences: )\d+", self.max_candidates)
        parameters = {"checkpoint_dir": str(self.checkpoint_dir), **self.parameters}
        names = "|".join(parameters)
        text = re.sub(rf'^parameters .*key: "({names})".*$', "", text, flags=re.MULTILINE)
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
            for key, value in parameters.items()
        ]
        return "\n".join([text, *lines, self.more, ""])


def replace_once(text: str, pattern: str, value: int) -> str:
    changed, count = re.subn(pattern, rf"\g<1>{value}", text)
    assert count == 1, f"{pattern} is in config.pbtxt {count} times"
    return changed


@dataclass(frozen=True)
class LoadedModel:
    server: TritonServer
    name: str

    def wire(self, protocol: str = "grpc") -> Wire:
        return Wire(self.server, self.name, protocol)

    def metrics(self) -> dict[str, float]:
        return metrics(self.server, self.name)


class VariantServer:
    """A tritonserver under explicit model control."""

    def __init__(self, server: TritonServer, repository: Path) -> None:
        self.server = server
        self._repository = repository

    @contextlib.contextmanager
    def loaded(self, variant: Variant) -> Iterator[LoadedModel]:
        self.load(variant)
        try:
            yield LoadedModel(self.server, variant.name)
        finally:
            self.unload(variant.name)

    def load(self, variant: Variant) -> None:
        """Raises InferenceServerException with the reason."""
        variant.write(self._repository)
        with self._client() as client:
            client.load_model(variant.name)

    def unload(self, name: str) -> None:
        with self._client() as client:
            client.unload_model(name)

    def _client(self) -> tritonclient.http.InferenceServerClient:
        return tritonclient.http.InferenceServerClient(
            self.server.http_url, connection_timeout=GUARD_S, network_timeout=GUARD_S
        )
