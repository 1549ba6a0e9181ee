"""Measures the host's share of a request: a round of the engine without the model, closed loop.

On a card this share fills an instance, and the step does not. The model is tiny, so that the
caches' work on the device costs nothing here, and its runner answers logits made before. Figures
are processor time, which a busy machine changes less.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import cast

import numpy as np
import torch

from benchmarks.engine import ClosedLoop, measuring_time
from benchmarks.random_wenet import WenetSize, write_random_wenet
from benchmarks.report import Figure, Report
from benchmarks.workload import CHUNK_S, Options, utterances
from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.features.samples import FLOAT32, PCM16
from oasr_backend.models import AcousticModel, CtcHead, ModelOutput
from oasr_backend.streaming.assemble import assemble
from oasr_backend.streaming.batching import Staging, StepBatch
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.store import StreamStore

STREAM_COUNTS = (16, 64, 256, 1024)
#: Running speech has as many: about two tokens a chunk.
_SPOKEN_SHARE = 0.12


class PreparedRunner:
    """Stands in for an EncoderRunner: the same output for every batch of a width."""

    runs_ahead = False

    def __init__(
        self,
        model: AcousticModel,
        store: StreamStore,
        *,
        window_shape: tuple[int, ...],
        num_lanes: int,  # noqa: ARG002
    ) -> None:
        head = cast(CtcHead, model.heads["ctc"])
        self._staging: Staging = {
            dtype: np.zeros(window_shape, dtype) for dtype in (FLOAT32, PCM16)
        }
        shape = (window_shape[0], store.chunk_frames, head.vocab_size)
        generator = torch.Generator().manual_seed(0)
        logits_BTV = torch.randn(shape, generator=generator)
        silent_BT = torch.rand(shape[:2], generator=generator) > _SPOKEN_SHARE
        logits_BTV[..., head.blank_id] += 20.0 * silent_BT
        encoded_BTD = torch.zeros((*shape[:2], model.spec.model_dim))
        self._output = ModelOutput(encoded_BTD, {"ctc": logits_BTV})

    def next_staging(self, lane: int = 0) -> Staging:  # noqa: ARG002
        return self._staging

    def capture(self) -> None:
        """There is nothing to capture."""

    def forward(self, batch: StepBatch) -> ModelOutput:
        return self._output.first(batch.width)


def _tiny_engine(*, num_streams: int) -> Engine:
    size = WenetSize(num_layers=1, model_dim=16, num_heads=1, feed_forward_dim=16, vocab_size=64)
    config = ServingConfig.of(max_streams=num_streams, max_step_streams=num_streams)
    with tempfile.TemporaryDirectory() as folder:
        directory = write_random_wenet(Path(folder), size)
        checkpoint = open_checkpoint(directory).load()
        cpu = torch.device("cpu")
        return assemble(checkpoint, config, device=cpu, make_runner=PreparedRunner)


def run(options: Options) -> Report:
    counts = STREAM_COUNTS[:2] if options.quick else STREAM_COUNTS
    torch.set_num_threads(1)
    engine = _tiny_engine(num_streams=max(counts))
    audio = utterances(quick=options.quick)
    seconds, warm_up = measuring_time(options)
    figures = []
    for count in counts:
        loop = ClosedLoop(engine, audio, count, clock=time.thread_time)
        times_s = loop.measure(seconds, warm_up_rounds=warm_up)
        figures.append(Figure(f"{count} streams", "us/request", (times_s / count * 1e6).tolist()))
        engine.close()
    configuration = {
        "chunk_s": CHUNK_S,
        "max_step_streams": engine.config.step.max_step_streams,
        "spoken_share": _SPOKEN_SHARE,
    }
    return Report("host", configuration, figures)
