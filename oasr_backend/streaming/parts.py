"""What an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass

from oasr_backend.config import ServingConfig
from oasr_backend.features import WindowGeometry
from oasr_backend.metrics import EngineMetrics
from oasr_backend.models.acoustic_model import AcousticModel
from oasr_backend.streaming.admission import Admission
from oasr_backend.streaming.results import ResultBuilder
from oasr_backend.streaming.runner import EncoderRunner
from oasr_backend.streaming.store import StreamStore
from oasr_backend.streaming.streams import StreamRegistry


@dataclass(frozen=True)
class EngineParts:
    """What an engine drives; `assemble` makes them fit each other."""

    config: ServingConfig
    model: AcousticModel
    geometry: WindowGeometry
    store: StreamStore
    streams: StreamRegistry
    admission: Admission
    runner: EncoderRunner
    results: ResultBuilder
    metrics: EngineMetrics
