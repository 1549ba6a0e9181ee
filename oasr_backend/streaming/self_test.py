"""One short utterance through each search of a loaded model, before it is called ready."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from oasr_backend.errors import ConfigError, SelfTestError
from oasr_backend.features import AudioBuffer
from oasr_backend.models.acoustic_model import ModelOutput
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.batching import StepBatch, slots_of, stack_windows
from oasr_backend.streaming.parts import EngineParts
from oasr_backend.streaming.streams import Stream, StreamRegistry
from oasr_backend.types import Samples

#: Quiet noise: not the silence whose features are all at their floor.
_LEVEL = 0.01
#: A first window, and a second one that sees the caches of the first.
_NUM_WINDOWS = 2


class SelfTest:
    """The parts of an engine that a stream passes through.

    Its streams are in no registry, no log and no metric of the engine, and their rows are free
    again at the end: streams that come later do not notice it.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._store, self._geometry = parts, parts.store, parts.geometry

    def run(self) -> None:
        """Open, step to the end, answer, close: once by each search of the checkpoint.

        The first stream has the server's own defaults; a further one leaves out what its search
        may not honour. Each asks for all that a document tells of its words. Raises SelfTestError
        naming the search when a part raises, gives numbers that are not finite or no hypothesis.
        """
        decoders = self._store.decoders
        defaults = replace(
            decoders.resolve(self._parts.admission.defaults), word_times=True, endpoint=True
        )
        others = [name for name in decoders.searches if name != defaults.decoder]
        try:
            for options in (defaults, *(_under(defaults, name) for name in others)):
                self._try(options)
        finally:
            decoders.drop_idle_kinds()

    def _try(self, options: StreamOptions) -> None:
        streams, name = self._registry(), options.decoder
        under = f"every file is read, but under decoder={name!r}"
        try:
            stream = streams.open("self-test", options, now_s=0.0)
            tail_padding = self._parts.config.server.tail_padding
            stream.accept(self._noise(stream), is_last=True, tail_padding=tail_padding)
            self._decode(stream)
            self._answer(stream)
            streams.close(stream)
            self._store.check_integrity()
        except SelfTestError:
            raise
        except ConfigError as error:
            # It tells its own remedy.
            raise SelfTestError(f"{under} a test stream fails: {error}") from error
        except Exception as error:
            raise SelfTestError(
                f"{under} a test stream fails ({type(error).__name__}: {error}), as every stream "
                f"would; mend the search {name!r}, or take it out of the checkpoint's searches"
            ) from error
        finally:
            for left in streams:
                streams.close(left)

    def _registry(self) -> StreamRegistry:
        return StreamRegistry(
            max_streams=1,
            idle_timeout_s=self._parts.config.server.stream_idle_timeout_s,
            store=self._store,
            new_buffer=lambda: AudioBuffer(self._geometry),
        )

    def _noise(self, stream: Stream) -> Samples:
        seconds = _NUM_WINDOWS * self._geometry.window_samples / self._geometry.frames.sample_rate
        num_samples = round(seconds * stream.options.sample_rate)
        noise_S = np.random.default_rng(0).standard_normal(num_samples, dtype=np.float32)
        return noise_S * np.float32(_LEVEL)

    def _decode(self, stream: Stream) -> None:
        slots_B, runner = slots_of([stream]), self._parts.runner
        while stream.has_ready_window and not self._store.at_capacity(slots_B).any():
            self._store.prepare(slots_B)
            batch = stack_windows([stream], slots_B, self._geometry, into=runner.next_staging())
            num_frames = int(batch.rows.num_frames_B[0])
            output = self._forward(batch)
            for head_1TX in output.heads.values():
                self._check_finite(head_1TX[0, :num_frames])
            self._store.commit(batch.rows, output)()
            stream.num_encoder_frames += num_frames

    def _forward(self, batch: StepBatch) -> ModelOutput:
        try:
            return self._parts.runner.forward(batch)
        except ConfigError:
            raise
        except Exception as error:
            raise SelfTestError(
                f"every file is read, but a test stream fails ({type(error).__name__}: {error}), "
                "as every stream would; see whether all files are of one training"
            ) from error

    def _check_finite(self, output_TX: Tensor) -> None:
        dtype = self._parts.config.model.dtype
        bad = output_TX.numel() - int(torch.isfinite(output_TX).sum())
        if bad:
            remedy = "serve it with dtype=float32, whose range is wider"
            if dtype == "float32":
                remedy = "take the checkpoint of an earlier step, and all its files of one training"
            raise SelfTestError(
                f"every file is read, but {bad} of {output_TX.numel()} outputs of a test stream "
                f"are not finite under dtype={dtype}; {remedy}"
            )

    def _answer(self, stream: Stream) -> None:
        if not self._store.decoders.nbest(stream.slot, 1):
            raise SelfTestError(
                f"every file is read, but the search {stream.options.decoder!r} gives a test "
                "stream no hypothesis; mend its hypotheses(), which returns one or more, without "
                "tokens where nothing is heard"
            )
        stream.finish_reason = "end"
        if weighing := self._store.decoders.end([stream.slot]):
            weighing.weigh()
            weighing.settle()
        (text,) = self._parts.results.texts([stream])
        self._parts.results.document(text, stream)


def _under(options: StreamOptions, name: str) -> StreamOptions:
    """With another search, and without what that may not honour."""
    return replace(options, decoder=name, nbest=1, hotwords="", use_lm=False, rescoring=False)
