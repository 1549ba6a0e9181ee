"""One short utterance through a loaded model, before it is called ready."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from oasr_backend.config import ServingConfig
from oasr_backend.errors import SelfTestError
from oasr_backend.features import AudioBuffer, WindowGeometry
from oasr_backend.models.acoustic_model import ModelOutput
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.batching import StepBatch, stack_windows
from oasr_backend.streaming.results import ResultBuilder
from oasr_backend.streaming.runner import EncoderRunner
from oasr_backend.streaming.store import StreamCaches
from oasr_backend.streaming.streams import Stream, StreamRegistry
from oasr_backend.types import Samples

#: Quiet noise: not the silence whose features are all at their floor.
_LEVEL = 0.01
#: A first window, and a second one that sees the caches of the first.
_NUM_WINDOWS = 2


@dataclass(frozen=True)
class SelfTest:
    """The parts of an engine that a stream passes through.

    Its stream is in no registry, no log and no metric of the engine, and its caches are free again
    at the end: streams that come later do not notice it.
    """

    caches: StreamCaches
    runner: EncoderRunner
    results: ResultBuilder
    geometry: WindowGeometry
    config: ServingConfig

    def run(self) -> None:
        """Open, step to the end, answer, free, under the server's own defaults for streams.

        Raises SelfTestError when a part raises or gives numbers that are not finite.
        """
        streams = self._registry()
        try:
            stream = streams.open("self-test", StreamOptions.from_config(self.config), now_s=0.0)
            stream.accept(self._noise(stream), is_last=True, tail_padding=self.config.tail_padding)
            self._decode(stream)
            self._answer(stream)
            streams.close(stream)
            self.caches.check_integrity()
        except SelfTestError:
            raise
        except Exception as error:
            raise SelfTestError(
                f"every file is read, but a test stream fails ({type(error).__name__}: {error}), "
                "as every stream would; see whether all files are of one training"
            ) from error
        finally:
            for left in streams:
                streams.close(left)
            self.caches.ctc.drop_idle_kinds()

    def _registry(self) -> StreamRegistry:
        return StreamRegistry(
            max_streams=1,
            idle_timeout_s=self.config.stream_idle_timeout_s,
            open_context=self.caches.open,
            new_buffer=lambda: AudioBuffer(self.geometry),
        )

    def _noise(self, stream: Stream) -> Samples:
        seconds = _NUM_WINDOWS * self.geometry.window_samples / self.geometry.frames.sample_rate
        num_samples = round(seconds * stream.options.sample_rate)
        noise_S = np.random.default_rng(0).standard_normal(num_samples, dtype=np.float32)
        return noise_S * np.float32(_LEVEL)

    def _decode(self, stream: Stream) -> None:
        attention = self.caches.attention
        while stream.has_ready_window and not attention.at_capacity(stream.generation):
            self.caches.prepare([stream.generation])
            batch = stack_windows([stream], self.geometry, into=self.runner.next_staging())
            output = self.runner.forward(batch)
            self._check_finite(batch, output)
            self.caches.commit(batch.generations, batch.num_frames, output)()
            stream.num_encoder_frames += batch.num_frames[0]

    def _check_finite(self, batch: StepBatch, output: ModelOutput) -> None:
        logits_TV = output.heads["ctc"][0, : batch.num_frames[0]]
        bad = logits_TV.numel() - int(torch.isfinite(logits_TV).sum())
        if bad:
            raise SelfTestError(
                f"every file is read, but {bad} of {logits_TV.numel()} outputs of a test stream "
                f"are not finite under dtype={self.config.dtype}; {self._remedy}"
            )

    @property
    def _remedy(self) -> str:
        if self.config.dtype == "float32":
            return "take the checkpoint of an earlier step, and all its files of one training"
        return "serve it with dtype=float32, whose range is wider"

    def _answer(self, stream: Stream) -> None:
        stream.finish_reason = "end"
        self.caches.ctc.end([stream.generation])
        (text,) = self.results.texts([stream])
        self.results.document(text, stream)
