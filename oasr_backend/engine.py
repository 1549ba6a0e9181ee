"""The order of things: requests in, answers out, one batched step for all that are ready.

State changes at four moments only: open, prepare, commit, close. A failure between prepare and
commit closes the streams of that step and touches no other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from oasr_backend.batching import StepBatch, next_batch, stack_windows
from oasr_backend.checkpoints import Checkpoint, load_wenet
from oasr_backend.config import ServingConfig
from oasr_backend.decoders import GpuDecoderConfig
from oasr_backend.encoders import EncoderSpec
from oasr_backend.errors import (
    InvalidRequestError,
    OasrError,
    StepFailedError,
    StreamCancelledError,
)
from oasr_backend.features import AudioBuffer, WindowGeometry
from oasr_backend.results import result_document
from oasr_backend.runner import EncoderRunner
from oasr_backend.stream_caches import StreamCaches, build_cache_config
from oasr_backend.stream_options import StreamOptions
from oasr_backend.streams import Stream, StreamRegistry
from oasr_backend.types import AudioChunk, ChunkResult, Hypothesis, StreamId

logger = logging.getLogger(__name__)

Request = AudioChunk | OasrError


@dataclass(frozen=True)
class _Turn:
    """One request on its way through `process`: its stream, or why it has none."""

    request: Request
    stream: Stream | None = None
    error: OasrError | None = None


class Engine:
    """Serves many streams with one model. Thread-safe: calls take turns."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ServingConfig,
        *,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config.with_defaults(on_gpu=device.type == "cuda")
        model = self.model = checkpoint.model
        dtype = getattr(torch, config.dtype)
        cache_config = build_cache_config(config, model.spec, device=device, dtype=dtype)
        most_positions = max(config.position_limit_frames, cache_config.max_stream_frames)
        model.prepare(device=device, dtype=dtype, num_positions=most_positions + config.chunk_size)
        self.config = config
        self.caches = StreamCaches(
            cache_config, _decoder_config(config, model.blank_id), vocab_size=model.vocab_size
        )
        self.geometry = _window_geometry(config, model.spec)
        self.streams = StreamRegistry(
            max_streams=config.max_streams,
            idle_timeout_s=config.stream_idle_timeout_s,
            open_context=self.caches.open,
            new_buffer=lambda: AudioBuffer(self.geometry),
        )
        self._runner = EncoderRunner(
            model,
            self.caches,
            window_shape=(config.max_step_streams, self.geometry.window_samples),
        )
        self._tokenizer = checkpoint.tokenizer
        self._clock = clock
        self._lock = threading.Lock()

    @classmethod
    def load(cls, checkpoint_dir: str | Path, config: ServingConfig, *, device: str) -> Engine:
        """Loads a checkpoint directory and gets ready to serve it on `device`."""
        return cls(load_wenet(checkpoint_dir), config, device=torch.device(device))

    def process(self, requests: Sequence[Request]) -> list[ChunkResult]:
        """One answer per request, in their order; never raises for one stream's fault."""
        with self._lock:
            now_s = self._clock()
            self._close_idle(now_s)
            answers: dict[int, ChunkResult] = {}
            for indices in self._rounds(requests):
                turns = [self._admit(requests[index], now_s) for index in indices]
                self._run([turn.stream for turn in turns if turn.stream is not None])
                answers.update(zip(indices, self._answer(turns), strict=True))
            return [answers[index] for index in range(len(requests))]

    def close_idle(self) -> int:
        """Frees streams whose callers went silent; for a background thread."""
        with self._lock:
            return self._close_idle(self._clock())

    def close(self) -> None:
        """Frees every stream."""
        with self._lock:
            for stream in self.streams:
                self.streams.close(stream)

    def check_integrity(self) -> None:
        """Every cache agrees with itself and with the open streams."""
        self.caches.check_integrity()

    def _rounds(self, requests: Sequence[Request]) -> list[list[int]]:
        """Indices of requests such that no id stands twice in a round.

        Triton keeps one request of a sequence in flight. So a START that shares a list with a
        continuation or END of a live stream of that id begins the *next* stream: it comes later.
        """
        rounds: list[list[int]] = []
        depth: dict[StreamId, int] = {}
        for index in sorted(range(len(requests)), key=lambda i: self._starts_anew(requests[i])):
            request = requests[index]
            level = 0
            if isinstance(request, AudioChunk):
                level = depth.get(request.stream_id, 0)
                depth[request.stream_id] = level + 1
            if level == len(rounds):
                rounds.append([])
            rounds[level].append(index)
        return rounds

    def _starts_anew(self, request: Request) -> bool:
        return (
            isinstance(request, AudioChunk)
            and request.is_first
            and request.stream_id in self.streams
        )

    def _admit(self, request: Request, now_s: float) -> _Turn:
        """Opens or finds the stream and gives it the samples; a refusal changes no other stream."""
        if isinstance(request, OasrError):
            return _Turn(request, error=request)
        try:
            stream = self._stream_of(request, now_s)
        except OasrError as error:
            return _Turn(request, error=error)
        try:
            self._accept(stream, request)
        except OasrError as error:
            if request.is_first or request.is_last or isinstance(error, StreamCancelledError):
                self.streams.close(stream)
            return _Turn(request, error=error)
        return _Turn(request, stream=stream)

    def _stream_of(self, chunk: AudioChunk, now_s: float) -> Stream:
        if not chunk.is_first:
            if chunk.parameters:
                raise InvalidRequestError(
                    f"stream {chunk.stream_id!r}: parameters {sorted(chunk.parameters)} on a later "
                    "request; send them with START"
                )
            return self.streams.get(chunk.stream_id, now_s=now_s)
        options = StreamOptions.from_parameters(chunk.parameters)
        if chunk.stream_id in self.streams:
            logger.warning("stream %r: START for a live stream; the old one ends", chunk.stream_id)
            self.streams.close(self.streams.get(chunk.stream_id, now_s=now_s))
        return self.streams.open(chunk.stream_id, options, now_s=now_s)

    def _accept(self, stream: Stream, chunk: AudioChunk) -> None:
        if chunk.is_cancelled():
            raise StreamCancelledError(f"stream {stream.stream_id!r}: the request was cancelled")
        if stream.context is None:
            raise InvalidRequestError(
                f"stream {stream.stream_id!r} ended at {stream.num_encoder_frames} frames "
                f"(finish_reason {stream.finish_reason!r}); send START to begin a new one"
            )
        _check_finite(chunk)
        stream.accept(chunk.samples_S, is_last=chunk.is_last, tail_padding=self.config.tail_padding)

    def _run(self, streams: Sequence[Stream]) -> None:
        """Steps until no stream of this round has a full window left."""
        while ready := next_batch(streams, max_step_streams=self.config.max_step_streams):
            if going_on := [stream for stream in ready if not self._ends_at_capacity(stream)]:
                self._step(going_on)

    def _step(self, streams: Sequence[Stream]) -> None:
        try:
            batch = self._prepare(streams)
            log_probs_BTV = self._runner.forward(batch)
            self._commit(streams, batch, log_probs_BTV)
        except Exception as error:
            self._fail(streams, error)

    def _prepare(self, streams: Sequence[Stream]) -> StepBatch:
        self.caches.prepare([stream.generation for stream in streams])
        return stack_windows(streams, self.geometry, into=self._runner.staging)

    def _commit(
        self, streams: Sequence[Stream], batch: StepBatch, log_probs_BTV: torch.Tensor
    ) -> None:
        self.caches.commit(batch.generations, batch.num_frames, log_probs_BTV)
        for stream, num_frames in zip(streams, batch.num_frames, strict=True):
            stream.num_encoder_frames += num_frames

    def _fail(self, streams: Sequence[Stream], error: Exception) -> None:
        """Closes the streams of a failed step: their rows may be half-written."""
        logger.error("a step of %d streams failed", len(streams), exc_info=error)
        for stream in streams:
            stream.failure = StepFailedError(
                f"stream {stream.stream_id!r} ends: the step failed ({error}); send START again"
            )
            self.streams.close(stream)

    def _ends_at_capacity(self, stream: Stream) -> bool:
        """Unlimited history has a ceiling; a stream that reaches it ends with its text so far."""
        if not self.caches.attention.at_capacity(stream.generation):
            return False
        stream.finish_reason = "length"
        stream.audio.discard()
        return True

    def _answer(self, turns: Sequence[_Turn]) -> list[ChunkResult]:
        heard = [turn.stream for turn in turns if turn.stream and not turn.stream.failure]
        hypotheses = self.caches.hypotheses([stream.generation for stream in heard])
        found = dict(zip((stream.generation for stream in heard), hypotheses, strict=True))
        return [self._answer_one(turn, found) for turn in turns]

    def _answer_one(self, turn: _Turn, found: Mapping[int, Hypothesis]) -> ChunkResult:
        stream, request = turn.stream, turn.request
        if stream is None or stream.failure or not isinstance(request, AudioChunk):
            return ChunkResult(error=turn.error or (stream and stream.failure))
        if request.is_last:
            stream.finish_reason = stream.finish_reason or "end"
            self.streams.close(stream)
        elif stream.finish_reason:
            self.streams.release(stream)
        text = self._tokenizer.decode(found[stream.generation].tokens)
        document = result_document(text, stream) if request.wants_result else None
        return ChunkResult(text=text, document=document)

    def _close_idle(self, now_s: float) -> int:
        idle = self.streams.close_idle(now_s)
        for stream in idle:
            logger.info("stream %r: freed, no request for too long", stream.stream_id)
        return len(idle)


def _check_finite(chunk: AudioChunk) -> None:
    if not np.isfinite(chunk.samples_S).all():
        position = int(np.flatnonzero(~np.isfinite(chunk.samples_S))[0])
        raise InvalidRequestError(
            f"stream {chunk.stream_id!r}: sample {position} is {chunk.samples_S[position]}; send "
            "finite values in [-1, 1]. The stream goes on without this request"
        )


def _decoder_config(config: ServingConfig, blank_id: int) -> GpuDecoderConfig:
    return GpuDecoderConfig(
        decoder="greedy" if config.decoder == "greedy" else "prefix_beam",
        beam_size=config.beam_size,
        blank_id=blank_id,
        blank_threshold=config.blank_threshold,
    )


def _window_geometry(config: ServingConfig, spec: EncoderSpec) -> WindowGeometry:
    return WindowGeometry(
        window_frames=spec.window_frames(config.chunk_size),
        stride_frames=spec.stride_frames(config.chunk_size),
        min_frames=spec.min_window_frames,
        subsampling=spec.subsampling_rate,
    )
